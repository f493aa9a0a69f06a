//! ds4's files, small enough for a test.

#![allow(dead_code, reason = "each test uses some of it")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use kvdepot_session::ds4::{Flags, Head, PAYLOAD_MAGIC, Reason, write};

/// Writes a file of so many tokens; its bytes. The rows of the first tokens are the same whatever
/// follows.
pub(crate) fn flash(path: &Path, tokens: u32, bits: u32, trailer: &[u8]) -> Vec<u8> {
    let model = Model {
        version: 2,
        tokens,
        layers: 4,
        head_dim: 8,
        index_dim: 4,
        vocab: 50,
        is_pro: false,
        bits: bits << 8,
    };
    let file = model.file(b"the rendered text", trailer);
    std::fs::write(path, &file).unwrap();
    file
}

/// A session small enough for a test, in ds4's shape.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Model {
    pub version: u32,
    pub tokens: u32,
    pub layers: u32,
    pub head_dim: u32,
    pub index_dim: u32,
    pub vocab: u32,
    pub is_pro: bool,
    /// Of two sessions with the same tokens those with other ones have other rows.
    pub bits: u32,
}

impl Model {
    /// The payload that ds4 would write, by its order of writing: another way to it than `parts`.
    pub(crate) fn payload(&self) -> Vec<u8> {
        let raw_rows = self.tokens.min(16);
        let ratio = |layer: u32| match layer {
            0 | 1 if self.is_pro => 128,
            0 | 1 => 0,
            _ if layer.is_multiple_of(2) => 4,
            _ => 128,
        };
        let rows = |ratio: u32| self.tokens.checked_div(ratio).unwrap_or(0);
        let mut words = vec![
            self.version,
            4096,
            128,
            32,
            16,
            1024,
            self.tokens,
            self.layers,
        ];
        words.extend([self.head_dim, self.index_dim, self.vocab, raw_rows]);
        words.extend((0..self.tokens).map(token_at));
        words.extend((0..self.vocab).map(|at| at ^ 0x3f80_0000));
        words.extend((0..self.layers).map(|layer| rows(ratio(layer))));
        let index = |layer| if ratio(layer) == 4 { rows(4) } else { 0 };
        words.extend((0..self.layers).map(index));
        for layer in 0..self.layers {
            let ratio = ratio(layer);
            let mut floats = raw_rows * self.head_dim;
            if ratio != 0 {
                let wide = if ratio == 4 { 2 } else { 1 };
                floats += rows(ratio) * self.head_dim;
                floats += 2 * (wide * self.head_dim) * (wide * ratio);
                if ratio == 4 {
                    floats += rows(ratio) * self.index_dim;
                    floats += 2 * (wide * self.index_dim) * (wide * ratio);
                }
            }
            words.extend((0..floats).map(|at| at ^ layer << 20 ^ self.bits));
        }
        let bytes = words.iter().flat_map(|word| word.to_le_bytes());
        PAYLOAD_MAGIC.into_iter().chain(bytes).collect()
    }

    pub(crate) fn file(&self, text: &[u8], trailer: &[u8]) -> Vec<u8> {
        let payload = self.payload();
        let head = head(self.tokens, payload.len() as u64);
        written(&head, text, &payload, trailer)
    }
}

pub(crate) fn token_at(at: u32) -> u32 {
    at.wrapping_mul(2_654_435_761) % 129_280
}

pub(crate) fn head(tokens: u32, payload_len: u64) -> Head {
    Head {
        quant_bits: 2,
        reason: Reason::COLD,
        flags: Flags(9),
        model: 0,
        tokens,
        hits: 3,
        context: 4096,
        revision: 2,
        reserved: [0; 3],
        created: 1_780_000_000,
        last_used: 1_780_000_001,
        payload_len,
    }
}

pub(crate) fn written(head: &Head, text: &[u8], payload: &[u8], trailer: &[u8]) -> Vec<u8> {
    let mut file = Vec::new();
    let len = write(&mut file, head, text, payload, trailer).unwrap();
    assert_eq!(len, file.len() as u64);
    file
}
