//! What can happen to a tier that several processes share, and how it is drawn.

use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::shrink::changed;
use kvdepot_testkit::sim::twin::Id;

/// Keys of a namespace.
pub const KEYS: u64 = 16;

/// Processes that share it.
pub const SHARERS: usize = 2;

/// What has the blocks of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    Posix,
    Ds3fs,
    S3,
}

/// What a history happens to.
#[derive(Clone, Debug)]
pub struct Shape {
    pub medium: Medium,
    /// `Cache` before it.
    pub cached: bool,
    /// Blocks are authenticated.
    pub keyed: bool,
    /// Everything fits, so that nothing is ever evicted.
    pub roomy: bool,
}

/// One thing that somebody does.
#[derive(Clone, Debug)]
pub enum Step {
    Put { ns: u8, keys: Vec<u16> },
    Get { ns: u8, keys: Vec<u16> },
    Prefetch { ns: u8, keys: Vec<u16> },
    Remove { ns: u8, keys: Vec<u16> },
    Clear { ns: u8 },
}

impl Step {
    /// The blocks that it is about.
    pub fn ids(&self) -> Vec<Id> {
        match self {
            Step::Put { ns, keys }
            | Step::Get { ns, keys }
            | Step::Prefetch { ns, keys }
            | Step::Remove { ns, keys } => keys.iter().map(|key| (*ns, *key)).collect(),
            Step::Clear { ns } => (0..KEYS as u16).map(|key| (*ns, key)).collect(),
        }
    }

    pub fn writes(&self) -> bool {
        matches!(self, Step::Put { .. })
    }

    pub fn removes(&self) -> bool {
        matches!(self, Step::Remove { .. } | Step::Clear { .. })
    }

    /// Its door, and what a process is told, where blocks have this content and these lengths.
    pub fn command(&self, of: impl Fn(Id) -> (u64, u64)) -> (&'static str, String) {
        let words = |ns: &u8, keys: &[u16], word: &dyn Fn(u16, u64, u64) -> String| {
            let each = keys.iter().map(|key| {
                let (content, len) = of((*ns, *key));
                word(*key, content, len)
            });
            each.collect::<String>()
        };
        let plain = |key: u16, _, _| format!(" {key}");
        let sized = |key: u16, _, len| format!(" {key}:{len}");
        let whole = |key: u16, content, len| format!(" {key}:{content}:{len}");
        match self {
            Step::Put { ns, keys } => ("put", format!("put {ns}{}", words(ns, keys, &whole))),
            Step::Get { ns, keys } => ("get", format!("get {ns} all{}", words(ns, keys, &sized))),
            Step::Prefetch { ns, keys } => {
                let keys = words(ns, keys, &plain);
                ("prefetch", format!("prefetch {ns}{keys}"))
            }
            Step::Remove { ns, keys } => {
                ("remove", format!("remove {ns}{}", words(ns, keys, &plain)))
            }
            Step::Clear { ns } => ("clear", format!("clear {ns}")),
        }
    }
}

/// What happens to whoever was asked, in the middle of what it does.
#[derive(Clone, Debug)]
pub enum Meanwhile {
    Nothing,
    /// Killed, after so many microseconds.
    Killed(u16),
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
    /// A block's bytes are others: with all that needs no key, where there is one.
    Rot { ns: u8, key: u16, at: u16 },
    /// The medium fails so often, in some way.
    Trouble { kind: u8, count: u8 },
    /// All is well again.
    Calm,
    /// One is closed, and opened again: on 3FS with a fault of its rings to come, or with none.
    Reopen { by: u8, kind: u8, number: u8 },
}

pub fn shape(rng: &mut Rng) -> Shape {
    Shape {
        medium: *rng.pick(&[
            Medium::Posix,
            Medium::Ds3fs,
            Medium::Ds3fs,
            Medium::S3,
            Medium::S3,
        ]),
        cached: rng.once_in(3),
        keyed: rng.once_in(2),
        roomy: !rng.once_in(4),
    }
}

fn keys(rng: &mut Rng, most: u64) -> Vec<u16> {
    let (first, count) = (rng.below(KEYS), rng.between(1, most));
    (0..count)
        .map(|index| ((first + index) % KEYS) as u16)
        .collect()
}

pub fn deeds(rng: &mut Rng) -> Vec<Deed> {
    let count = rng.between(6, 30);
    (0..count).map(|_| deed(rng)).collect()
}

pub fn step(rng: &mut Rng) -> Step {
    let ns = u8::from(rng.once_in(4));
    match rng.below(20) {
        0..9 => Step::Put {
            ns,
            keys: keys(rng, 6),
        },
        9..15 => Step::Get {
            ns,
            keys: keys(rng, 8),
        },
        15..17 => Step::Prefetch {
            ns,
            keys: keys(rng, 4),
        },
        17..19 => Step::Remove {
            ns,
            keys: keys(rng, 3),
        },
        _ => Step::Clear { ns },
    }
}

fn deed(rng: &mut Rng) -> Deed {
    let by = rng.below(SHARERS as u64) as u8;
    match rng.below(20) {
        0..14 => Deed::Do {
            by,
            step: step(rng),
            meanwhile: match rng.below(12) {
                0 => Meanwhile::Killed(rng.below(20_000) as u16),
                1..5 => Meanwhile::Other(step(rng)),
                _ => Meanwhile::Nothing,
            },
        },
        14..16 => Deed::Rot {
            ns: u8::from(rng.once_in(4)),
            key: rng.below(KEYS) as u16,
            at: rng.bits() as u16,
        },
        16 => Deed::Trouble {
            kind: rng.bits() as u8,
            count: rng.between(1, 4) as u8,
        },
        17 => Deed::Calm,
        _ => Deed::Reopen {
            by,
            kind: rng.below(12) as u8,
            number: rng.between(1, 40) as u8,
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
        Deed::Reopen { by, kind, number } if *kind > 0 => vec![Deed::Reopen {
            by: *by,
            kind: 0,
            number: *number,
        }],
        _ => Vec::new(),
    }
}

pub fn plainer(shape: &Shape) -> Vec<Shape> {
    changed(
        shape,
        &[
            |shape| shape.cached = false,
            |shape| shape.keyed = false,
            |shape| shape.medium = Medium::Posix,
        ],
    )
}
