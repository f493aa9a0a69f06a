//! Sessions for files, of which each byte is known.

#![allow(dead_code, reason = "each test uses some of it")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::sync::Arc;

use kvdepot_session::Reason;
use kvdepot_session::file::{FileCheckpoint, FileMover, FileOptions, SessionFile};
use kvdepot_store::{BlockBuffers, Buffer, Durability, NamespaceSpec};
use kvdepot_testkit::Rng;
use kvdepot_testkit::bytes::content;

/// Tokens of a piece.
pub(crate) const PIECE: usize = 64;

pub(crate) fn mover(direct: bool, durability: Durability) -> Arc<FileMover> {
    let mut options = FileOptions::default();
    (options.direct, options.durability, options.lanes) = (direct, durability, 2);
    FileMover::new(options).unwrap()
}

pub(crate) fn namespace(weights: &str) -> NamespaceSpec {
    NamespaceSpec {
        model: "m".into(),
        dtype: "f16".into(),
        block_tokens: PIECE as u64,
        weights: Some(weights.into()),
        ..NamespaceSpec::default()
    }
}

pub(crate) fn checkpoint<'a>(spec: &'a NamespaceSpec, tokens: &'a [u32]) -> FileCheckpoint<'a> {
    FileCheckpoint {
        namespace: spec,
        tokens,
        text: b"some text",
        reason: Reason::Asked,
        context_tokens: 4096,
        note: "",
        created: 1_700_000_000 + tokens.len() as u64,
    }
}

/// Names of a directory, in order.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// What a session has: a seed for all bytes, and how many of each piece and object.
#[derive(Clone, Debug)]
pub(crate) struct Parts {
    pub(crate) seed: u64,
    pub(crate) pieces: Vec<usize>,
    pub(crate) objects: Vec<usize>,
}

impl Parts {
    pub(crate) fn new(seed: u64, pieces: &[usize], objects: &[usize]) -> Parts {
        Parts {
            seed,
            pieces: pieces.to_vec(),
            objects: objects.to_vec(),
        }
    }

    pub(crate) fn random(rng: &mut Rng) -> Parts {
        let len = |rng: &mut Rng| match rng.below(4) {
            0 => 1 + rng.below(100) as usize,
            1 => 4096 * (1 + rng.below(20) as usize),
            2 => 1 + rng.below(100_000) as usize,
            _ => (4 << 20) - 5000 + rng.below(10_000) as usize,
        };
        let pieces = (0..1 + rng.below(5)).map(|_| len(rng)).collect();
        let objects = (0..rng.below(3)).map(|_| len(rng)).collect();
        let seed = rng.below(1 << 30);
        Parts {
            seed,
            pieces,
            objects,
        }
    }

    /// As many tokens as the pieces are of; the last one is short.
    pub(crate) fn tokens(&self) -> Vec<u32> {
        let count = (self.pieces.len() * PIECE).saturating_sub(PIECE / 2).max(1);
        let each = (0..count as u32).map(|at| at * 7 % 1000);
        std::iter::once(self.seed as u32)
            .chain(each)
            .take(count)
            .collect()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.pieces.iter().chain(&self.objects).sum::<usize>() as u64
    }

    fn member(&self, at: usize, len: usize) -> Vec<u8> {
        content(self.seed * 1000 + at as u64, len)
    }

    /// Memory of some bytes, so many behind a page, and in two where it is long.
    fn memory(bytes: &[u8], skip: usize) -> Vec<Buffer> {
        let mut memory = vec![0; bytes.len() + skip + 4096];
        let begin = memory.as_ptr().align_offset(4096) + skip;
        memory[begin..begin + bytes.len()].copy_from_slice(bytes);
        let whole = Buffer::from_vec(memory);
        let cut = if bytes.len() > 50_000 { 20_480 } else { 0 };
        let part = |at, len| whole.slice(begin + at, len).unwrap();
        vec![part(0, cut), part(cut, bytes.len() - cut)]
    }

    pub(crate) fn pieces(&self, skip: usize) -> BlockBuffers {
        let mut blocks = BlockBuffers::default();
        for (at, len) in self.pieces.iter().enumerate() {
            blocks.push(Self::memory(&self.member(at, *len), skip));
        }
        blocks
    }

    pub(crate) fn objects(&self, skip: usize) -> Vec<(String, Buffer)> {
        let each = self.objects.iter().enumerate();
        each.map(|(at, len)| {
            let bytes = self.member(self.pieces.len() + at, *len);
            let memory = Buffer::from_vec([vec![0; skip], bytes].concat());
            (format!("object {at}"), memory.slice(skip, *len).unwrap())
        })
        .collect()
    }

    /// Brings it back; tokens whose rows have come, which are right, and whether all have.
    pub(crate) fn restore(&self, file: &SessionFile) -> (usize, bool) {
        let buffers = |lens: &[usize]| {
            BlockBuffers::whole(lens.iter().map(|len| Buffer::from_vec(vec![0xEE; *len])))
        };
        let (rows, objects) = (buffers(&self.pieces), buffers(&self.objects));
        let restored = file.restore(&rows, &objects).unwrap();
        for (at, (run, bytes)) in file.pieces().into_iter().enumerate() {
            if run.end <= restored.cached_tokens {
                let there = rows.pieces(at)[0].to_vec();
                assert!(there == self.member(at, bytes as usize), "piece {at}");
            }
        }
        if restored.whole {
            for (at, len) in self.objects.iter().enumerate() {
                let there = objects.pieces(at)[0].to_vec();
                assert!(
                    there == self.member(self.pieces.len() + at, *len),
                    "object {at}"
                );
            }
        }
        (restored.cached_tokens, restored.whole)
    }
}
