//! Damage to a file: what media do to bytes over the years, and what a careless copy does.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::seed::Rng;

/// One kind of damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Damage {
    /// One bit turned over.
    Flip,
    /// A run of bytes zeroed.
    Zero,
    /// Two runs of bytes exchanged.
    Swap,
}

/// All kinds.
pub const DAMAGES: [Damage; 3] = [Damage::Flip, Damage::Zero, Damage::Swap];

/// A file that its test damages.
#[derive(Debug)]
pub struct Patient(File);

impl Patient {
    /// Opens an existing file.
    ///
    /// # Panics
    /// When it cannot be opened.
    #[must_use]
    pub fn open(path: &Path) -> Patient {
        Patient(
            OpenOptions::new()
                .read(true)
                .write(true)
                .open(path)
                .unwrap(),
        )
    }

    /// `len` bytes at `offset`.
    ///
    /// # Panics
    /// When the file has fewer.
    #[must_use]
    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }

    /// Writes bytes at `offset`.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        self.0.write_all_at(bytes, offset).unwrap();
    }

    /// Cuts the file off.
    ///
    /// # Panics
    /// When it cannot be cut.
    pub fn truncate(&self, len: u64) {
        self.0.set_len(len).unwrap();
    }

    /// Bytes that it has.
    ///
    /// # Panics
    /// When the file cannot be asked.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> u64 {
        self.0.metadata().unwrap().len()
    }

    /// Damages some of the `len` bytes at `offset`, really: the bytes differ afterwards.
    ///
    /// # Panics
    /// When they cannot be changed, because all of them are zero for instance.
    pub fn damage(&self, damage: Damage, offset: u64, len: u64, rng: &mut Rng) {
        for _ in 0..1000 {
            let run = rng.between(1, len.min(64));
            let at = offset + rng.below(len - run + 1);
            let before = self.read(at, run as usize);
            match damage {
                Damage::Flip => {
                    let mut after = before;
                    after[rng.below(run) as usize] ^= 1 << rng.below(8);
                    self.write(at, &after);
                    return;
                }
                Damage::Zero if before.iter().any(|byte| *byte != 0) => {
                    self.write(at, &vec![0; run as usize]);
                    return;
                }
                Damage::Swap => {
                    let other = offset + rng.below(len - run + 1);
                    let there = self.read(other, run as usize);
                    if at.abs_diff(other) >= run && there != before {
                        self.write(at, &there);
                        self.write(other, &before);
                        return;
                    }
                }
                Damage::Zero => {}
            }
        }
        panic!("{damage:?} changes nothing in {len} bytes at {offset}");
    }
}
