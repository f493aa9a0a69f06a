//! What can happen between processes, and how it is drawn.

use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::shrink::changed;

/// Keys of a namespace.
pub const KEYS: u64 = 24;
const PIPELINES: [&str; 5] = ["Dax", "Dax", "Cache|Dax", "Cache|Dax", "Cache"];

/// What a history happens to.
#[derive(Clone, Debug)]
pub struct Shape {
    pub pipeline: &'static str,
    /// Everything fits, so that nothing is ever evicted.
    pub roomy: bool,
    pub clients: u8,
    /// How long a client waits for its owner, in milliseconds.
    pub timeout: u64,
    pub power: bool,
    pub drop: bool,
    /// The arena's file is cut.
    pub truncates: bool,
    /// `Nvme` in the place of `Dax`: the same, by calls.
    pub disk: bool,
}

/// What happens to whoever was asked, in the middle of what it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meanwhile {
    Nothing,
    /// Stopped for longer than anybody is waited for, and continued.
    Stopped,
    /// Its connections end: some time later, or with an answer that it has not read.
    Cut,
    Killed,
    /// Its owner is killed, and the next one opens.
    OwnerKilled,
    /// Its owner is stopped, and continued once it has answered.
    OwnerStopped,
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
    Prefetch {
        ns: u8,
        keys: Vec<u16>,
    },
    Remove {
        ns: u8,
        keys: Vec<u16>,
    },
    Reserve {
        ns: u8,
        keys: Vec<u16>,
    },
    /// The mover fills a reservation, and its client commits.
    Commit {
        held: u8,
    },
    Abort {
        held: u8,
    },
    Pin {
        ns: u8,
        keys: Vec<u16>,
    },
    /// The mover reads a pinned block.
    Load {
        pin: u8,
    },
    Unpin {
        pin: u8,
        served: bool,
    },
    /// The arena's file is cut to so many hundredths.
    Truncate {
        part: u8,
    },
    /// A device verb by a client.
    Grow {
        kib: u16,
    },
    /// The file system is left with so many KiB; `None` makes room for everything again.
    Disk {
        kib: Option<u16>,
    },
    /// A peer's connection ends in the middle of a frame.
    HalfAFrame {
        key: u16,
    },
    Reopen,
}

/// A step with who does it, what happens to it meanwhile, and after how many microseconds.
#[derive(Clone, Debug)]
pub struct Deed {
    pub client: u8,
    pub step: Step,
    pub meanwhile: Meanwhile,
    pub after: u16,
}

pub fn shape(rng: &mut Rng) -> Shape {
    let truncates = rng.once_in(3);
    Shape {
        truncates,
        pipeline: PIPELINES[rng.below(5) as usize],
        roomy: !rng.once_in(3),
        clients: rng.between(1, 2) as u8,
        // Whoever loses its owner cannot map a medium again that was cut.
        timeout: match truncates {
            true => 10_000,
            false => *rng.pick(&[200, 10_000, 10_000]),
        },
        power: rng.once_in(8),
        drop: rng.once_in(3),
        disk: rng.once_in(3),
    }
}

fn keys(rng: &mut Rng, most: u64) -> Vec<u16> {
    let (first, count) = (rng.below(KEYS), rng.between(1, most));
    (0..count)
        .map(|index| ((first + index) % KEYS) as u16)
        .collect()
}

pub fn deeds(rng: &mut Rng, shape: &Shape) -> Vec<Deed> {
    // Some histories have few faults: what is held grows old there.
    let calm = *rng.pick(&[2, 4, 8]);
    let count = rng.between(8, 40);
    (0..count)
        .map(|_| {
            let step = step(rng, shape.truncates);
            Deed {
                client: rng.below(2) as u8,
                meanwhile: meanwhile(rng, calm, shape),
                step,
                after: rng.below(2500) as u16,
            }
        })
        .collect()
}

fn meanwhile(rng: &mut Rng, calm: u64, shape: &Shape) -> Meanwhile {
    if !rng.once_in(calm) {
        return Meanwhile::Nothing;
    }
    match rng.below(8) {
        0..3 => Meanwhile::Killed,
        3 => Meanwhile::Cut,
        4 if shape.timeout < 1000 => Meanwhile::Stopped,
        5 if shape.timeout < 1000 => Meanwhile::OwnerStopped,
        6 | 7 => Meanwhile::OwnerKilled,
        _ => Meanwhile::Nothing,
    }
}

fn step(rng: &mut Rng, truncates: bool) -> Step {
    let ns = u8::from(rng.once_in(4));
    let any = rng.bits() as u8;
    match rng.below(41) {
        0..10 => Step::Put {
            ns,
            keys: keys(rng, 6),
        },
        10..17 => Step::Get {
            ns,
            keys: keys(rng, 8),
            prefix: rng.once_in(3),
        },
        17 => Step::Prefetch {
            ns,
            keys: keys(rng, 6),
        },
        18..20 => Step::Remove {
            ns,
            keys: keys(rng, 3),
        },
        20..24 => Step::Reserve {
            ns,
            keys: keys(rng, 3),
        },
        24..29 => Step::Commit { held: any },
        29 => Step::Abort { held: any },
        30..32 => Step::Pin {
            ns,
            keys: keys(rng, 3),
        },
        32..35 => Step::Load { pin: any },
        35 => Step::Unpin {
            pin: any,
            served: rng.once_in(2),
        },
        36 if truncates => Step::Truncate {
            part: rng.between(4, 95) as u8,
        },
        36 | 37 => Step::Grow {
            kib: rng.between(1, 32) as u16 * 4,
        },
        38 => Step::HalfAFrame {
            key: rng.below(KEYS) as u16,
        },
        39 => Step::Disk {
            kib: (!rng.once_in(4)).then(|| *rng.pick(&[0, 4, 40, 100])),
        },
        40 => Step::Reopen,
        _ => Step::Commit { held: any },
    }
}

pub fn simpler(deed: &Deed) -> Vec<Deed> {
    changed(deed, &[|deed| deed.meanwhile = Meanwhile::Nothing])
}

pub fn plainer(shape: &Shape) -> Vec<Shape> {
    changed(
        shape,
        &[
            |shape| shape.clients = 1,
            |shape| shape.power = false,
            |shape| shape.drop = false,
        ],
    )
}
