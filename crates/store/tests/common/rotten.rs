//! Blocks that have rotted in a tier, found out by each door: what is put right behind that is
//! stored, not taken for what was there.

#![allow(
    dead_code,
    clippy::allow_attributes,
    reason = "each test binary uses its own part of this"
)]

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use kvdepot_store::{Namespace, Outcome};

use crate::common::{PATIENCE, get, keys, pin_all, put};

pub(crate) const LEN: usize = 9001;

/// Blocks, and those of one call.
pub(crate) const BLOCKS: u64 = 192;
const EACH: u64 = 8;

/// Who finds out.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Finder {
    Get,
    Prefetch,
    Discard,
}

/// Flips the last byte of a block in a file.
pub(crate) fn rot(file: &Path) {
    let file = fs::File::options().read(true).write(true).open(file);
    let file = file.unwrap();
    let (mut byte, at) = ([0], 4096 + LEN as u64 - 1);
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
}

/// Finds out about all blocks, and puts those of each call again.
pub(crate) fn find_and_put(ns: &Namespace, finders: &[Finder]) {
    for (begin, finder) in (0..BLOCKS)
        .step_by(EACH as usize)
        .zip(finders.iter().cycle())
    {
        let some: Vec<u64> = (begin..begin + EACH).collect();
        let corrupt = [Outcome::Corrupt; EACH as usize];
        match finder {
            Finder::Get => assert_eq!(get(ns, &some, LEN), corrupt),
            Finder::Prefetch => {
                let task = ns.prefetch(&keys(some.iter().copied())).unwrap();
                task.wait(Some(PATIENCE)).unwrap();
                assert_eq!(task.outcomes(), corrupt);
            }
            Finder::Discard => {
                let pins = pin_all(ns, begin..begin + EACH);
                assert_eq!(ns.discard(&pins), EACH as usize);
                ns.unpin(&pins, false);
            }
        }
        assert_eq!(put(ns, &some, LEN), [true; EACH as usize], "{finder:?}");
    }
}
