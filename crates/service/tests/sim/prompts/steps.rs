//! What can happen to prompts, and how it is drawn.

use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::shrink::changed;

/// Usual prompts, and large ones.
pub const USUAL: u16 = 12;
pub const LARGE: u16 = 4;

/// Blocks that usual prompts have in common with others at most, and of their own.
const SHARED: u64 = 4;
const OWN: u64 = 8;

const PIPELINES: [&str; 8] = [
    "Cache",
    "Dax",
    "Nvme",
    "Posix",
    "Peer",
    "Cache|Dax",
    "Cache|Posix",
    "Cache|Peer",
];

/// What a history happens to.
#[derive(Clone, Debug)]
pub struct Shape {
    pub pipeline: &'static str,
    /// Blocks of the last tier.
    pub blocks: u64,
    pub learned: bool,
    /// Blocks of each usual prompt that it shares with each third one, and all of its blocks.
    pub usual: Vec<(u16, u16)>,
    /// Blocks of each large prompt.
    pub large: Vec<u16>,
}

/// One thing that happens.
#[derive(Clone, Debug)]
pub enum Deed {
    /// A usual prompt is loaded as far as it is there; the rest is stored in calls of so many
    /// blocks.
    Serve {
        prompt: u16,
        step: u16,
    },
    /// It is loaded alone.
    Use {
        prompt: u16,
    },
    /// Large prompts are stored, their calls in turns, and between two of them one of these is
    /// loaded.
    Large {
        prompts: Vec<u16>,
        step: u16,
        used: Vec<u16>,
    },
    /// A block of a usual prompt is removed.
    Remove {
        prompt: u16,
        at: u16,
    },
    Reopen,
}

pub fn shape(rng: &mut Rng) -> Shape {
    let blocks = rng.between(64, 128);
    let usual = (0..USUAL).map(|_| {
        let shared = rng.below(SHARED + 1);
        (shared as u16, (shared + rng.between(1, OWN)) as u16)
    });
    let usual = usual.collect();
    let large = (0..LARGE).map(|_| rng.between(blocks / 4, blocks * 5 / 2) as u16);
    let large = large.collect();
    Shape {
        pipeline: rng.pick::<&str>(&PIPELINES),
        blocks,
        learned: rng.once_in(4),
        usual,
        large,
    }
}

pub fn deeds(rng: &mut Rng) -> Vec<Deed> {
    let count = rng.between(8, 40);
    (0..count).map(|_| deed(rng)).collect()
}

fn deed(rng: &mut Rng) -> Deed {
    let prompt = rng.below(u64::from(USUAL)) as u16;
    let step = rng.between(1, 9) as u16;
    match rng.below(20) {
        0..9 => Deed::Serve { prompt, step },
        9..12 => Deed::Use { prompt },
        12..18 => Deed::Large {
            prompts: (0..rng.between(1, 2))
                .map(|_| rng.below(u64::from(LARGE)) as u16)
                .collect(),
            step: *rng.pick(&[1, 3, 7, 16, 500]),
            used: (0..rng.below(4))
                .map(|_| rng.below(u64::from(USUAL)) as u16)
                .collect(),
        },
        18 => Deed::Remove {
            prompt,
            at: rng.below(SHARED + OWN) as u16,
        },
        _ => Deed::Reopen,
    }
}

pub fn simpler(deed: &Deed) -> Vec<Deed> {
    let Deed::Large {
        prompts,
        step,
        used,
    } = deed
    else {
        return Vec::new();
    };
    let large = |prompts: &[u16], used: &[u16]| Deed::Large {
        prompts: prompts.to_vec(),
        step: *step,
        used: used.to_vec(),
    };
    let mut simpler = Vec::new();
    if prompts.len() > 1 {
        simpler.extend(prompts.iter().map(|one| large(&[*one], used)));
    }
    if let Some((_, used)) = used.split_last() {
        simpler.push(large(prompts, used));
    }
    simpler
}

pub fn plainer(shape: &Shape) -> Vec<Shape> {
    changed(
        shape,
        &[
            |shape| shape.learned = false,
            |shape| shape.usual.iter_mut().for_each(|usual| usual.0 = 0),
        ],
    )
}
