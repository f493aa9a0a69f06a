//! What can happen to a pipeline of tiers that stand apart, and how it is drawn.

use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::shrink::{changed, one_less};

use super::memory::Bytes;
use super::sharer::Deed;
use super::shelf::Mood;
use super::terms::{self, Limits, Terms};

/// Keys of a namespace.
pub const KEYS: u64 = 16;
/// Namespaces of a history.
pub const NAMESPACES: u64 = 2;

/// What a history happens to.
#[derive(Clone, Debug)]
pub struct Shape {
    pub pipeline: &'static str,
    /// Capacities in KiB.
    pub cache: u64,
    pub dax: u64,
    /// Whether what `Mid` has outlives the process, and KiB of the largest block that it takes.
    pub mid_lasts: bool,
    pub mid: u64,
    /// Where bytes of tiers apart lie.
    pub bytes: Bytes,
    /// Whether there are movers, and two phases.
    pub moved: bool,
    pub drop: bool,
    pub promote: bool,
    /// KiB that may wait at the first edge; 0 for the default.
    pub write_back: u64,
    /// A tier that blocks go on into at their second touch.
    pub second: &'static str,
    /// What goes on into one of the tiers, and how long the last one may take.
    pub terms: Terms,
    pub limits: Option<Limits>,
    /// Whether there is a second depot over the directory of `Posix`, and its KiB; 0 where there
    /// is room for all.
    pub shared: bool,
    pub room: u64,
    /// Bytes of the largest block.
    pub largest: u64,
    /// As tiers behave at first.
    pub mood: Mood,
    /// `Nvme` in the place of `Dax`: the same, by calls.
    pub disk: bool,
    /// Whether blocks of `Posix` are authenticated. What rots there is forged then.
    pub keyed: bool,
}

/// One thing that happens.
#[derive(Clone, Debug)]
pub enum Step {
    Put {
        ns: u8,
        keys: Vec<u16>,
    },
    Get {
        ns: u8,
        keys: Vec<u16>,
        prefix: bool,
    },
    Lookup {
        ns: u8,
        keys: Vec<u16>,
    },
    Contains {
        ns: u8,
        keys: Vec<u16>,
    },
    Prefix {
        ns: u8,
        keys: Vec<u16>,
    },
    Nearest {
        ns: u8,
        keys: Vec<u16>,
    },
    Prefetch {
        ns: u8,
        keys: Vec<u16>,
    },
    Remove {
        ns: u8,
        keys: Vec<u16>,
    },
    Clear {
        ns: u8,
    },
    Reserve {
        ns: u8,
        keys: Vec<u16>,
    },
    /// The reservation of that number, and others of its namespace.
    Commit {
        held: u8,
        count: u8,
    },
    Abort {
        held: u8,
        count: u8,
    },
    Pin {
        ns: u8,
        keys: Vec<u16>,
        prefix: bool,
    },
    Load {
        pin: u8,
    },
    Unpin {
        pin: u8,
        count: u8,
        served: bool,
    },
    List {
        ns: u8,
    },
    Gone,
    Drain,
    /// So many slices, carries and answers have their turn.
    Jobs {
        count: u8,
    },
    Background {
        count: u8,
    },
    /// Time passes until a question's is over.
    Ring,
    Pass {
        ms: u32,
        /// Jobs after each of which as much time passes again.
        jobs: u8,
    },
    /// All is done that can be.
    Settle,
    /// Of the next slices, carries and answers so many fail.
    Fail {
        count: u8,
    },
    Mood {
        tier: u8,
        mood: Mood,
    },
    /// A byte of a block turns over.
    Rot {
        tier: u8,
        ns: u8,
        key: u16,
        at: u32,
    },
    /// Every tier answers, until the next mood: then all has to be there.
    Calm,
    Reopen,
    /// The second depot over the same directory does something.
    Share {
        deed: Deed,
    },
}

/// A shape.
pub fn shape(rng: &mut Rng) -> Shape {
    const PIPELINES: &[&str] = &[
        "Far",
        "Cache|Far",
        "Cache|Far",
        "Dax|Far",
        "Mid|Far",
        "Cache|Dax|Far",
        "Cache|Dax|Far",
        "Cache|Mid|Far",
        "Cache|Mid|Far",
        "Dax|Mid|Far",
        "Cache|Dax|Mid|Far",
    ];
    let bytes = *rng.pick(&[
        Bytes::Memory,
        Bytes::Carried,
        Bytes::Files,
        Bytes::Files,
        Bytes::Posix,
        Bytes::Posix,
        Bytes::Posix,
        Bytes::Posix,
    ]);
    let is_small = bytes == Bytes::Posix && rng.once_in(2);
    let room = if is_small { 1024 } else { 0 };
    let largest = *rng.pick(&[2000, 9000, 30_000]);
    let moved = rng.once_in(2);
    Shape {
        pipeline: rng.pick::<&str>(PIPELINES),
        cache: *rng.pick(&[32, 64, 128, 1024]),
        dax: *rng.pick(&[256, 384, 2048, 2048]),
        mid_lasts: rng.once_in(2),
        mid: *rng.pick(&[16, 64, 256]),
        bytes,
        moved,
        drop: rng.once_in(3),
        promote: !rng.once_in(4),
        write_back: *rng.pick(&[0, 16, 16, 32]),
        second: rng.pick::<&str>(&["", "", "", "Far", "Mid", "Dax"]),
        terms: terms::terms(rng),
        limits: terms::limits(rng),
        shared: rng.once_in(2),
        room,
        largest: match room {
            0 => largest,
            // So that it is full soon.
            _ => 110_000,
        },
        mood: mood(rng),
        disk: rng.once_in(3),
        // Lanes of other processes have no keys, and find nothing there.
        keyed: bytes == Bytes::Posix && !moved && rng.once_in(2),
    }
}

fn mood(rng: &mut Rng) -> Mood {
    let often = |rng: &mut Rng, each: &[u64]| *rng.pick(each);
    Mood {
        late: often(rng, &[0, 30, 80, 100]),
        silent: often(rng, &[0, 0, 0, 5, 30, 100]),
        refuses: often(rng, &[0, 0, 10, 40]),
        broken: often(rng, &[0, 0, 0, 10]),
    }
}

/// A run of neighbours, or any keys, each once.
fn keys(rng: &mut Rng, most: u64) -> Vec<u16> {
    let count = rng.between(1, most);
    let first = rng.below(KEYS);
    let mut keys: Vec<u16> = match rng.below(4) {
        0 => (0..count).map(|_| rng.below(KEYS) as u16).collect(),
        _ => (0..count)
            .map(|index| ((first + index) % KEYS) as u16)
            .collect(),
    };
    let mut seen = std::collections::BTreeSet::new();
    keys.retain(|key| seen.insert(*key));
    keys
}

/// An hour and some minutes.
const HOUR: u32 = 3_900_000;

/// How often each kind of step is drawn in one history: some not at all.
const WEIGHTS: [u64; 29] = [
    20, 18, 4, 3, 3, 2, 5, 5, 1, 2, 1, 1, 14, 6, 4, 3, 3, 2, 4, 3, 2, 1, 7, 5, 1, 9, 9, 4, 30,
];

/// The steps of a history.
pub fn steps(rng: &mut Rng) -> Vec<Step> {
    let count = rng.between(8, 90);
    let mut weights = WEIGHTS;
    for weight in weights.iter_mut().skip(2).filter(|_| rng.once_in(4)) {
        *weight = 0;
    }
    (0..count).map(|_| step(rng, &weights)).collect()
}

fn step(rng: &mut Rng, weights: &[u64]) -> Step {
    let mut at = rng.below(weights.iter().sum());
    let kind = weights.iter().position(|weight| {
        let here = at < *weight;
        at = at.saturating_sub(*weight);
        here
    });
    of_kind(rng, kind.unwrap_or(0))
}

fn of_kind(rng: &mut Rng, kind: usize) -> Step {
    let (ns, tier) = (u8::from(rng.once_in(5)), rng.below(2) as u8);
    let count = rng.between(1, 6) as u8;
    let keys = keys(rng, 6);
    match kind {
        0 => Step::Put { ns, keys },
        1 => Step::Get {
            ns,
            keys,
            prefix: rng.once_in(3),
        },
        2 => Step::Lookup { ns, keys },
        3 => Step::Contains { ns, keys },
        4 => Step::Prefix { ns, keys },
        5 => Step::Nearest { ns, keys },
        6 => Step::Prefetch { ns, keys },
        7 => Step::Remove { ns, keys },
        8 => Step::Clear { ns },
        9 => Step::List { ns },
        10 => Step::Gone,
        11 => Step::Drain,
        12 => Step::Jobs { count },
        13 => Step::Background { count },
        14 => Step::Ring,
        15 => Step::Pass {
            ms: *rng.pick(&[1, 100, 600, 2000, 30_000, HOUR]),
            jobs: rng.below(3) as u8,
        },
        16 => Step::Settle,
        17 => Step::Fail { count },
        18 => Step::Mood {
            tier,
            mood: mood(rng),
        },
        19 => Step::Rot {
            tier,
            ns,
            key: keys[0],
            at: rng.bits() as u32,
        },
        20 => Step::Calm,
        21 => Step::Reopen,
        22 => Step::Reserve { ns, keys },
        23 => Step::Commit { held: tier, count },
        24 => Step::Abort { held: tier, count },
        25 => Step::Pin {
            ns,
            keys,
            prefix: rng.once_in(3),
        },
        26 => Step::Load { pin: count },
        27 => Step::Unpin {
            pin: tier,
            count,
            served: rng.once_in(2),
        },
        _ => Step::Share {
            deed: deed(rng, ns, keys),
        },
    }
}

fn deed(rng: &mut Rng, ns: u8, keys: Vec<u16>) -> Deed {
    match rng.below(10) {
        0..5 => Deed::Put { ns, keys },
        5..7 => Deed::Get { ns, keys },
        7..9 => Deed::Remove {
            ns,
            keys,
            quiet: rng.once_in(2),
        },
        _ => Deed::End {
            dies: rng.once_in(2),
        },
    }
}

/// Something that happens while a call waits.
pub fn nested(rng: &mut Rng) -> Step {
    match rng.below(22) {
        0..3 => of_kind(rng, 0),
        3..6 => of_kind(rng, 1),
        6..9 => of_kind(rng, 7),
        9 => of_kind(rng, 6),
        10 => of_kind(rng, 3),
        11 => of_kind(rng, 8),
        12..15 => Step::Background { count: 1 },
        15 => of_kind(rng, 22),
        16 => of_kind(rng, 23),
        17 => of_kind(rng, 25),
        18 => of_kind(rng, 27),
        19..21 => of_kind(rng, 28),
        _ => Step::Ring,
    }
}

/// Steps that do less.
pub fn simpler(step: &Step) -> Vec<Step> {
    let named = |step: &Step| match step {
        Step::Share {
            deed: Deed::Put { keys, .. } | Deed::Get { keys, .. } | Deed::Remove { keys, .. },
        }
        | Step::Put { keys, .. }
        | Step::Get { keys, .. }
        | Step::Lookup { keys, .. }
        | Step::Prefetch { keys, .. }
        | Step::Reserve { keys, .. }
        | Step::Pin { keys, .. }
        | Step::Remove { keys, .. } => keys.len(),
        _ => 0,
    };
    let leave_out = |step: &mut Step, at| match step {
        Step::Share {
            deed: Deed::Put { keys, .. } | Deed::Get { keys, .. } | Deed::Remove { keys, .. },
        }
        | Step::Put { keys, .. }
        | Step::Get { keys, .. }
        | Step::Lookup { keys, .. }
        | Step::Prefetch { keys, .. }
        | Step::Reserve { keys, .. }
        | Step::Pin { keys, .. }
        | Step::Remove { keys, .. } => {
            keys.remove(at);
        }
        _ => {}
    };
    let mut simpler = one_less(step, named(step), leave_out);
    simpler.extend(changed(
        step,
        &[
            |step| {
                if let Step::Mood { mood, .. } = step {
                    mood.refuses = 0;
                }
            },
            |step| {
                if let Step::Mood { mood, .. } = step {
                    mood.broken = 0;
                }
            },
            |step| {
                if let Step::Mood { mood, .. } = step {
                    mood.late = 0;
                }
            },
        ],
    ));
    simpler
}

/// Shapes that are plainer.
pub fn plainer(shape: &Shape) -> Vec<Shape> {
    changed(
        shape,
        &[
            |shape| shape.bytes = Bytes::Memory,
            |shape| shape.moved = false,
            |shape| shape.keyed = false,
            |shape| shape.drop = false,
            |shape| shape.second = "",
            |shape| shape.terms = Terms::default(),
            |shape| (shape.terms.hour, shape.terms.day) = (0, 0),
            |shape| (shape.terms.block_min, shape.terms.block_max) = (0, 0),
            |shape| shape.limits = None,
            |shape| shape.shared = false,
            |shape| shape.room = 0,
            |shape| shape.write_back = 0,
            |shape| shape.mood = Mood::default(),
            |shape| shape.mood.broken = 0,
            |shape| shape.mood.refuses = 0,
            |shape| shape.mood.silent = 0,
            |shape| shape.mood.late = 0,
            |shape| shape.cache = 1024,
            |shape| shape.dax = 2048,
        ],
    )
}
