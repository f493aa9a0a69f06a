//! What can happen, and how it is drawn.

use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::shrink::{changed, one_less};

/// Keys of a namespace.
pub const KEYS: u64 = 40;
/// Those that most calls name.
const COMMON: u64 = 20;
/// Namespaces of a history.
pub const NAMESPACES: u64 = 2;

/// What a history happens to.
#[derive(Clone, Debug)]
pub struct Shape {
    pub pipeline: &'static str,
    /// Capacities in KiB.
    pub cache: u64,
    pub dax: u64,
    pub devices: u64,
    pub records: u64,
    /// All blocks take the same room, so that nothing is ever scattered.
    pub uniform: bool,
    pub large: bool,
    pub drop: bool,
    pub promote: bool,
    /// What has left unread is not stored again.
    pub learned: bool,
    pub power: bool,
    /// KiB that may wait for the far tier; 0 for the default.
    pub write_back: u64,
    /// Depots over the socket beside the one that owns the arenas.
    pub clients: u64,
    pub socket: bool,
    /// Some calls are for memory of a CUDA device.
    pub cuda: bool,
    /// `Nvme` in the place of `Dax`: the same, by calls.
    pub disk: bool,
}

/// One thing that happens. Doors, reservations, pins and devices are counted around.
#[derive(Clone, Debug)]
pub enum Step {
    Put {
        door: u8,
        ns: u8,
        blocks: Vec<(u16, u32)>,
        pieces: u8,
    },
    Get {
        door: u8,
        ns: u8,
        keys: Vec<u16>,
        prefix: bool,
        staged: bool,
        /// The key whose buffer is a byte too long.
        misfit: Option<u8>,
        pieces: u8,
    },
    Prefetch {
        door: u8,
        ns: u8,
        keys: Vec<u16>,
    },
    Remove {
        door: u8,
        ns: u8,
        keys: Vec<u16>,
    },
    Clear {
        door: u8,
        ns: u8,
    },
    Reserve {
        door: u8,
        ns: u8,
        blocks: Vec<(u16, Vec<u32>)>,
        strict: bool,
    },
    /// Fills some reservations and commits them in one call.
    Commit {
        held: u8,
        count: u8,
    },
    /// Commits with too few checksums, which is refused and ends nothing.
    BadCommit {
        held: u8,
    },
    Abort {
        held: u8,
        count: u8,
    },
    Pin {
        door: u8,
        ns: u8,
        keys: Vec<u16>,
        prefix: bool,
    },
    /// Reads a pinned block, part by part.
    Load {
        pin: u8,
    },
    Unpin {
        pin: u8,
        count: u8,
        served: bool,
    },
    Discard {
        pin: u8,
    },
    /// Keeps blocks as one.
    Group {
        door: u8,
        ns: u8,
        keys: Vec<u16>,
        class: u8,
    },
    /// Adds blocks to a group, and gives it a class.
    Regroup {
        group: u8,
        keys: Vec<u16>,
        class: u8,
    },
    /// Pins all of a group, or nothing, for a moment.
    PinGroup {
        group: u8,
    },
    Ungroup {
        group: u8,
    },
    /// Lanes move so many slices.
    Lanes {
        count: u8,
    },
    Background {
        count: u8,
    },
    /// All is done that can be.
    Settle,
    /// Of the next slices so many fail.
    Fail {
        count: u8,
    },
    /// A byte of a block turns over, and somebody may read the block at once.
    Rot {
        ns: u8,
        key: u16,
        at: u32,
        reader: Option<u8>,
    },
    Add {
        device: u8,
    },
    DrainDevice {
        device: u8,
        others: bool,
    },
    RemoveDevice {
        device: u8,
        force: bool,
    },
    Grow {
        device: u8,
        kib: u16,
    },
    /// The file system is left with so many KiB; `None` makes room for everything again.
    Disk {
        kib: Option<u16>,
    },
    /// Another depot starts in this process, which fails, or is not wanted any more.
    Start {
        kind: u8,
    },
    Reopen,
    /// The process is killed: what the files hold at this moment is opened again.
    Crash,
    /// Each file is cut to so many hundredths under the mapping, and opened again.
    Truncate {
        part: u8,
    },
    /// Somebody holds all the room.
    FillUp {
        door: u8,
        ns: u8,
        first: u16,
    },
    /// A process that speaks the protocol badly.
    Noise {
        kind: u8,
        key: u16,
    },
}

impl Shape {
    /// Whether what a cut of the media has lost is known soon. By calls a file grows again when it
    /// is written, and what a near tier has of its blocks hides that they are gone there.
    fn may_be_cut(&self) -> bool {
        self.devices > 0 && !(self.disk && self.pipeline != "Dax")
    }
}

/// A shape without clients, whose history is a schedule.
pub fn scheduled_shape(rng: &mut Rng) -> Shape {
    let pipeline = *rng.pick(&["Dax", "Dax", "Cache", "Cache|Dax", "Cache|Dax", "Cache|Dax"]);
    let large = rng.once_in(24);
    let scale = if large { 16 } else { 1 };
    Shape {
        pipeline,
        cache: *rng.pick(&[64, 128, 256, 512]) * scale,
        dax: *rng.pick(&[256, 288, 320, 384, 512]) * scale,
        devices: match pipeline {
            "Cache" => 0,
            _ => *rng.pick(&[1, 1, 1, 2, 2, 3]),
        },
        records: *rng.pick(&[8, 16, 32, 64, 64]),
        uniform: rng.once_in(4),
        large,
        drop: rng.once_in(3),
        promote: !rng.once_in(4),
        learned: rng.once_in(2),
        power: rng.once_in(6),
        write_back: *rng.pick(&[0, 0, 16, 32, 64]),
        clients: 0,
        socket: false,
        disk: rng.once_in(4),
        cuda: rng.once_in(3),
    }
}

/// The same with clients over the socket.
pub fn served_shape(rng: &mut Rng) -> Shape {
    Shape {
        large: false,
        clients: rng.between(1, 2),
        ..scheduled_shape(rng)
    }
}

/// Room that each block of a uniform history takes.
pub const UNIFORM: u64 = 8192;

fn len(rng: &mut Rng, shape: &Shape) -> u32 {
    if shape.uniform {
        return rng.between(UNIFORM / 2 + 1, UNIFORM) as u32;
    }
    let scale = if shape.large { 16 } else { 1 };
    (match rng.below(12) {
        0..3 => rng.between(1, 200),
        3..6 => rng.between(4080, 4112),
        6..10 => rng.between(5_000, 30_000) * scale,
        10 => rng.between(30_000, 100_000) * scale,
        _ => rng.between(1, 4) * 4096,
    }) as u32
}

/// A run of neighbours, or any keys.
fn keys(rng: &mut Rng, most: u64) -> Vec<u16> {
    let (keys, count) = match rng.once_in(25) {
        // More than are planned in one go.
        true => (KEYS, rng.between(30, KEYS)),
        false => (COMMON, rng.between(1, most)),
    };
    let first = rng.below(keys);
    match rng.below(4) {
        0 => (0..count).map(|_| rng.below(keys) as u16).collect(),
        _ => (0..count)
            .map(|index| ((first + index) % keys) as u16)
            .collect(),
    }
}

fn distinct(mut keys: Vec<u16>) -> Vec<u16> {
    let mut seen = std::collections::HashSet::new();
    keys.retain(|key| seen.insert(*key));
    keys
}

fn parts(rng: &mut Rng, shape: &Shape) -> Vec<u32> {
    match rng.below(3) {
        0 => vec![len(rng, shape)],
        _ if shape.uniform => vec![len(rng, shape)],
        _ => (0..rng.between(2, 4)).map(|_| len(rng, shape)).collect(),
    }
}

/// How often each kind of step is drawn in one history: some not at all, so that others meet
/// undisturbed.
const WEIGHTS: [u64; 18] = [22, 16, 4, 4, 1, 7, 8, 1, 3, 4, 3, 4, 1, 9, 6, 6, 2, 6];

/// The steps of a history.
pub fn steps(rng: &mut Rng, shape: &mut Shape) -> Vec<Step> {
    let count = rng.between(10, 140);
    let mut weights = WEIGHTS;
    weights
        .iter_mut()
        .skip(1)
        .filter(|_| rng.once_in(3))
        .for_each(|weight| *weight = 0);
    if shape.clients > 0 {
        weights[15] = 12;
    } else if rng.once_in(2) {
        // Without a mover nothing is committed or loaded.
        weights[5..13].fill(0);
    }
    let steps: Vec<Step> = (0..count).map(|_| step(rng, shape, &weights)).collect();
    let moves = |step: &Step| matches!(step, Step::Commit { .. } | Step::Load { .. });
    shape.socket = shape.clients > 0 || steps.iter().any(moves);
    steps
}

fn step(rng: &mut Rng, shape: &Shape, weights: &[u64]) -> Step {
    let (door, ns) = (rng.below(1 + shape.clients) as u8, u8::from(rng.once_in(4)));
    let mut at = rng.below(weights.iter().sum());
    let kind = weights.iter().position(|weight| {
        let here = at < *weight;
        at = at.saturating_sub(*weight);
        here
    });
    match kind.unwrap_or(0) {
        0 => {
            let blocks = keys(rng, 6).into_iter();
            let blocks = blocks.map(|key| (key, len(rng, shape))).collect();
            let pieces = rng.between(1, 3) as u8;
            Step::Put {
                door,
                ns,
                blocks,
                pieces,
            }
        }
        1 => get(rng, door, ns),
        2 => Step::Prefetch {
            door,
            ns,
            keys: keys(rng, 6),
        },
        3 => Step::Remove {
            door,
            ns,
            keys: keys(rng, 3),
        },
        4 => Step::Clear { door, ns },
        5 => {
            let blocks = keys(rng, 3).into_iter();
            let blocks = blocks.map(|key| (key, parts(rng, shape))).collect();
            Step::Reserve {
                door,
                ns,
                blocks,
                strict: rng.once_in(4),
            }
        }
        6 => Step::Commit {
            held: rng.bits() as u8,
            count: rng.between(1, 3) as u8,
        },
        7 => Step::BadCommit {
            held: rng.bits() as u8,
        },
        8 => Step::Abort {
            held: rng.bits() as u8,
            count: rng.between(1, 3) as u8,
        },
        9 => Step::Pin {
            door,
            ns,
            keys: keys(rng, 4),
            prefix: rng.once_in(2),
        },
        10 => Step::Load {
            pin: rng.bits() as u8,
        },
        11 => {
            let (pin, count) = (rng.bits() as u8, rng.between(1, 4) as u8);
            Step::Unpin {
                pin,
                count,
                served: rng.once_in(2),
            }
        }
        12 => Step::Discard {
            pin: rng.bits() as u8,
        },
        13 => match rng.below(3) {
            0 => Step::Lanes {
                count: rng.between(1, 6) as u8,
            },
            1 => Step::Background {
                count: rng.between(1, 3) as u8,
            },
            _ => Step::Settle,
        },
        14 => device(rng, shape),
        15 => fault(rng, shape),
        16 => Step::Settle,
        _ => grouped(rng, door, ns),
    }
}

fn get(rng: &mut Rng, door: u8, ns: u8) -> Step {
    let keys = distinct(keys(rng, 8));
    let misfit = rng.once_in(6).then(|| rng.below(keys.len() as u64) as u8);
    Step::Get {
        door,
        ns,
        keys,
        prefix: rng.once_in(3),
        staged: rng.once_in(5),
        misfit,
        pieces: rng.between(1, 3) as u8,
    }
}

fn grouped(rng: &mut Rng, door: u8, ns: u8) -> Step {
    let (group, class) = (rng.bits() as u8, rng.below(3) as u8);
    match rng.below(6) {
        0..3 => Step::Group {
            door,
            ns,
            keys: keys(rng, 6),
            class,
        },
        3 => Step::Regroup {
            group,
            keys: keys(rng, 2),
            class,
        },
        4 => Step::PinGroup { group },
        _ => Step::Ungroup { group },
    }
}

fn device(rng: &mut Rng, shape: &Shape) -> Step {
    let device = rng.below(3) as u8;
    if shape.devices == 0 {
        return Step::Settle;
    }
    match rng.below(11) {
        0..2 => Step::Add { device },
        2..4 => Step::DrainDevice {
            device,
            others: !rng.once_in(4),
        },
        4..6 => Step::RemoveDevice {
            device,
            force: rng.once_in(3),
        },
        6..9 => Step::Grow {
            device,
            kib: rng.between(1, 64) as u16 * 4,
        },
        9 => Step::Disk {
            kib: (!rng.once_in(4)).then(|| *rng.pick(&[0, 4, 100, 100, 300])),
        },
        _ => Step::Start {
            kind: rng.below(4) as u8,
        },
    }
}

fn fault(rng: &mut Rng, shape: &Shape) -> Step {
    match rng.below(8) {
        7 if shape.may_be_cut() && rng.once_in(3) => Step::Truncate {
            part: rng.between(40, 99) as u8,
        },
        0..2 => Step::Fail {
            count: rng.between(1, 3) as u8,
        },
        2..4 if shape.devices > 0 => Step::Rot {
            ns: u8::from(rng.once_in(4)),
            key: rng.below(COMMON) as u16,
            at: rng.bits() as u32,
            reader: rng.once_in(2).then(|| rng.below(1 + shape.clients) as u8),
        },
        4 => Step::Reopen,
        5 => Step::Crash,
        // Whoever may reserve.
        _ if shape.clients == 0 && rng.once_in(2) || rng.once_in(8) => Step::FillUp {
            door: rng.below(1 + shape.clients) as u8,
            ns: 0,
            first: rng.below(COMMON) as u16,
        },
        _ if shape.clients > 0 => Step::Noise {
            kind: rng.below(6) as u8,
            key: rng.below(COMMON) as u16,
        },
        _ => Step::Lanes { count: 20 },
    }
}

/// Something that happens while a call waits.
pub fn nested(rng: &mut Rng, shape: &Shape) -> Step {
    let ns = u8::from(rng.once_in(4));
    match rng.below(11) {
        0..2 => Step::Remove {
            door: 0,
            ns,
            keys: keys(rng, 3),
        },
        2..4 => get(rng, 0, ns),
        4..6 => {
            let blocks = keys(rng, 3).into_iter();
            let blocks = blocks.map(|key| (key, len(rng, shape))).collect();
            Step::Put {
                door: 0,
                ns,
                blocks,
                pieces: 1,
            }
        }
        6 => Step::Clear { door: 0, ns },
        7 => Step::Unpin {
            pin: rng.bits() as u8,
            count: 2,
            served: rng.once_in(2),
        },
        8 => Step::Pin {
            door: 0,
            ns,
            keys: keys(rng, 3),
            prefix: false,
        },
        9 => Step::Ungroup {
            group: rng.bits() as u8,
        },
        _ => Step::Abort {
            held: rng.bits() as u8,
            count: 1,
        },
    }
}

/// Steps that do less.
pub fn simpler(step: &Step) -> Vec<Step> {
    let named = match step {
        Step::Put { blocks, .. } => blocks.len(),
        Step::Reserve { blocks, .. } => blocks.len(),
        Step::Get { keys, .. } | Step::Pin { keys, .. } | Step::Prefetch { keys, .. } => keys.len(),
        Step::Group { keys, .. } => keys.len(),
        _ => 0,
    };
    let leave_out = |step: &mut Step, at| match step {
        Step::Put { blocks, .. } => drop(blocks.remove(at)),
        Step::Reserve { blocks, .. } => drop(blocks.remove(at)),
        Step::Get { keys, .. } | Step::Pin { keys, .. } | Step::Prefetch { keys, .. } => {
            keys.remove(at);
        }
        Step::Group { keys, .. } => drop(keys.remove(at)),
        _ => {}
    };
    let mut simpler = one_less(step, named, leave_out);
    simpler.extend(changed(step, &[small, at_the_owner, plain]));
    simpler
}

fn small(step: &mut Step) {
    match step {
        Step::Put { blocks, pieces, .. } => {
            blocks.iter_mut().for_each(|(_, len)| *len = 100.min(*len));
            *pieces = 1;
        }
        Step::Reserve { blocks, .. } => {
            let lens = blocks.iter_mut().flat_map(|(_, lens)| lens);
            lens.for_each(|len| *len = 100.min(*len));
        }
        _ => {}
    }
}

fn at_the_owner(step: &mut Step) {
    match step {
        Step::Put { door, pieces, .. } => (*door, *pieces) = (0, 1),
        Step::Get { door, .. } => *door = 0,
        _ => {}
    }
}

fn plain(step: &mut Step) {
    if let Step::Get {
        prefix,
        staged,
        misfit,
        pieces,
        ..
    } = step
    {
        (*prefix, *staged, *misfit, *pieces) = (false, false, None, 1);
    }
}

/// Shapes that are plainer.
pub fn plainer(shape: &Shape) -> Vec<Shape> {
    changed(
        shape,
        &[
            |shape| shape.devices = shape.devices.min(1),
            |shape| shape.power = false,
            |shape| shape.drop = false,
            |shape| shape.cuda = false,
            |shape| shape.write_back = 0,
            |shape| shape.clients = shape.clients.min(1),
        ],
    )
}
