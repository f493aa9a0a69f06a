//! Chains: the name of a beginning of a text, or of a run of tokens, from piece to piece.
//!
//! A chain's link is BLAKE3 over the link before it and the bytes of its piece. Bytes are those of
//! tokens as little-endian u32, or of rendered text. A last piece may be short: its link has
//! another length of input than every full one, and so another name.

use kvdepot_store::Key;

/// A link of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Link(pub(crate) [u8; 32]);

/// How bytes are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// What tells chains of one kind from those of another.
    pub(crate) context: &'static str,
    /// Bytes of a piece.
    pub(crate) piece: usize,
}

impl Cut {
    /// Of tokens, in pieces of so many.
    pub(crate) fn of_tokens(piece_tokens: u32) -> Cut {
        Cut {
            context: "kvdepot session tokens 1",
            piece: piece_tokens as usize * size_of::<u32>(),
        }
    }

    /// Of rendered text. Short: a prompt's last words decide, and a link costs some 100 ns.
    pub(crate) fn of_text() -> Cut {
        Cut {
            context: "kvdepot session text 1",
            piece: 256,
        }
    }

    /// Before the first piece.
    pub(crate) fn start(self) -> Link {
        Link(blake3::derive_key(
            self.context,
            &(self.piece as u64).to_le_bytes(),
        ))
    }

    /// A link for each piece, the last of which may be short.
    pub(crate) fn links(self, bytes: &[u8]) -> Vec<Link> {
        let mut last = self.start();
        let link = |piece| {
            last = last.then(piece);
            last
        };
        bytes.chunks(self.piece).map(link).collect()
    }

    /// The start, and a link for each piece that is full.
    pub(crate) fn boundaries(self, bytes: &[u8]) -> Vec<Link> {
        let (full, _) = bytes.split_at(bytes.len() - bytes.len() % self.piece);
        std::iter::once(self.start())
            .chain(self.links(full))
            .collect()
    }
}

impl Link {
    /// The link behind this one.
    pub(crate) fn then(self, piece: &[u8]) -> Link {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.0).update(piece);
        Link(*hasher.finalize().as_bytes())
    }

    /// The key of the piece that ends here.
    pub(crate) fn key(self) -> Key {
        Key(self.0)
    }

    /// The key of another piece that ends here: of the same tokens, with other bytes.
    pub(crate) fn variant(self, sum: &[u8; 32]) -> Key {
        let said = [self.0, *sum].concat();
        Key(blake3::derive_key("kvdepot session variant 1", &said))
    }

    /// The key of an object of the checkpoint that ends here, with bytes of this BLAKE3.
    pub(crate) fn object(self, name: &str, sum: &[u8; 32]) -> Key {
        let said = [&self.0[..], sum, name.as_bytes()].concat();
        Key(blake3::derive_key("kvdepot session object 1", &said))
    }

    /// The key of a manifest, with bytes of this BLAKE3, of a checkpoint that ends here.
    pub(crate) fn manifest(self, sum: &[u8; 32]) -> Key {
        let said = [self.0, *sum].concat();
        Key(blake3::derive_key("kvdepot session manifest 1", &said))
    }
}

/// Tokens as bytes.
pub(crate) fn bytes_of(tokens: &[u32]) -> Vec<u8> {
    tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_beginnings_have_common_links_and_nothing_else_does() {
        let cut = Cut::of_tokens(4);
        let one = cut.links(&bytes_of(&[1, 2, 3, 4, 5, 6, 7, 8, 9]));
        let other = cut.links(&bytes_of(&[1, 2, 3, 4, 5, 6, 7, 9]));
        assert_eq!((one.len(), other.len()), (3, 2));
        assert_eq!(one[0], other[0]);
        assert_ne!(one[1], other[1]);
        // A short piece is no beginning of a full one.
        assert_ne!(cut.links(&bytes_of(&[1, 2, 3]))[0], one[0]);
        // Nor are tokens text.
        assert_ne!(cut.start(), Cut::of_text().start());
        assert_ne!(cut.start(), Cut::of_tokens(5).start());
        assert_eq!(cut.boundaries(&bytes_of(&[1, 2, 3, 4, 5])).len(), 2);
        let keys = [
            one[0].key(),
            one[0].object("a", &[0; 32]),
            one[0].object("b", &[0; 32]),
        ];
        assert!(keys[0] != keys[1] && keys[1] != keys[2] && keys[0] != one[0].manifest(&[0; 32]));
    }
}
