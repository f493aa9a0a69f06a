//! What engines with sessions may do, and what may happen to them.

use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::shrink::changed;

use super::words::{KINDS, Talk};

/// Processes with sessions.
pub const TALKERS: usize = 3;

/// Whose depot it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// Another process's, which serves it.
    Served(&'static str),
    /// Each has its own, over one directory.
    Shared,
}

/// What a history happens to.
#[derive(Clone, Debug)]
pub struct Shape {
    pub medium: Medium,
    /// `Cache` before a directory that is shared.
    pub cached: bool,
    /// Everything fits, so that the last tier never evicts anything.
    pub roomy: bool,
    /// A `Cache` before that tier evicts all the same.
    pub tight: bool,
    pub power: bool,
    /// `Nvme` in the place of `Dax`.
    pub disk: bool,
}

/// One thing that an engine does.
#[derive(Clone, Debug)]
pub enum Step {
    Save {
        talk: Talk,
        kind: u8,
        created: u8,
    },
    /// Looks for a prompt that begins with a talk, and brings back what is found.
    Ask {
        talk: Talk,
        more: u8,
        anew: bool,
        text: bool,
    },
    Refresh,
    Remove {
        which: u8,
    },
    Verify,
    /// A session goes into a file, and from there to somebody.
    Travel {
        which: u8,
        to: u8,
    },
}

/// What happens in the middle of it.
#[derive(Clone, Debug)]
pub enum Meanwhile {
    Nothing,
    /// It is killed, after so many microseconds.
    Killed(u16),
    /// The owner is, and the next one opens.
    OwnerKilled(u16),
    /// Another one does this.
    Other(Step),
}

#[derive(Clone, Debug)]
pub enum Deed {
    Do {
        by: u8,
        step: Step,
        meanwhile: Meanwhile,
    },
    /// A bit of something that is stored turns over.
    Rot { which: u16, at: u16 },
    /// The tier that acknowledges loses a block, as for want of room, whatever nearer ones have.
    Evict { which: u16 },
    /// The file system is left with so many KiB; `None` makes room for everything again.
    Disk { kib: Option<u8> },
    /// One of the talkers, or the owner, is closed and opened again.
    Reopen { by: u8 },
}

pub fn shape(rng: &mut Rng) -> Shape {
    Shape {
        medium: *rng.pick(&[
            Medium::Served("Cache"),
            Medium::Served("Dax"),
            Medium::Served("Cache|Dax"),
            Medium::Served("Posix"),
            Medium::Served("Cache|Posix"),
            Medium::Shared,
            Medium::Shared,
        ]),
        cached: rng.once_in(3),
        roomy: !rng.once_in(3),
        tight: rng.once_in(2),
        power: rng.once_in(8),
        disk: rng.once_in(2),
    }
}

pub fn deeds(rng: &mut Rng) -> Vec<Deed> {
    // Some histories have few faults: what is stored grows there.
    let calm = *rng.pick(&[2, 4, 12]);
    let rots = rng.once_in(3);
    let count = rng.between(6, 40);
    (0..count).map(|_| deed(rng, calm, rots)).collect()
}

pub fn step(rng: &mut Rng) -> Step {
    match rng.below(20) {
        0..9 => Step::Save {
            talk: Talk::draw(rng),
            kind: rng.below(KINDS) as u8,
            created: rng.below(4) as u8,
        },
        9..14 => Step::Ask {
            talk: Talk::draw(rng),
            more: rng.below(20) as u8,
            anew: !rng.once_in(3),
            text: rng.once_in(4),
        },
        14 => Step::Refresh,
        15..17 => Step::Remove {
            which: rng.bits() as u8,
        },
        17 => Step::Verify,
        _ => Step::Travel {
            which: rng.bits() as u8,
            to: rng.below(TALKERS as u64) as u8,
        },
    }
}

fn deed(rng: &mut Rng, calm: u64, rots: bool) -> Deed {
    let by = rng.below(TALKERS as u64) as u8;
    match rng.below(24) {
        0 if rots => Deed::Rot {
            which: rng.bits() as u16,
            at: rng.bits() as u16,
        },
        3 => Deed::Evict {
            which: rng.bits() as u16,
        },
        1 => Deed::Disk {
            kib: (!rng.once_in(3)).then(|| *rng.pick(&[0, 4, 20])),
        },
        2 => Deed::Reopen {
            by: rng.below(TALKERS as u64 + 1) as u8,
        },
        _ => Deed::Do {
            by,
            step: step(rng),
            meanwhile: match rng.below(calm * 3) {
                0 => Meanwhile::Killed(rng.below(8_000) as u16),
                1 => Meanwhile::OwnerKilled(rng.below(8_000) as u16),
                2 | 3 => Meanwhile::Other(step(rng)),
                _ => Meanwhile::Nothing,
            },
        },
    }
}

pub fn simpler(deed: &Deed) -> Vec<Deed> {
    match deed {
        Deed::Do {
            meanwhile: Meanwhile::Nothing,
            ..
        } => Vec::new(),
        Deed::Do { by, step, .. } => vec![Deed::Do {
            by: *by,
            step: step.clone(),
            meanwhile: Meanwhile::Nothing,
        }],
        _ => Vec::new(),
    }
}

pub fn plainer(shape: &Shape) -> Vec<Shape> {
    changed(
        shape,
        &[
            |shape| shape.cached = false,
            |shape| shape.tight = false,
            |shape| shape.power = false,
            |shape| shape.medium = Medium::Shared,
            |shape| shape.medium = Medium::Served("Dax"),
        ],
    )
}
