//! What can happen to hosts, and how it is drawn.

use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::shrink::changed;

use crate::shared::steps::{Step, step};

/// What a history happens to.
#[derive(Clone, Debug)]
pub struct Shape {
    pub hosts: u8,
    pub replicas: u8,
    /// Who is there is known by an etcd, where this machine has one: hosts that leave are none.
    pub etcd: bool,
    /// `Cache` before it, and a directory that all share behind it.
    pub cached: bool,
    pub backed: bool,
    /// A share outlives its process.
    pub lasts: bool,
    /// Blocks are authenticated.
    pub keyed: bool,
    /// Everything fits, so that nothing is ever evicted.
    pub roomy: bool,
}

/// What happens in the middle of what somebody does.
#[derive(Clone, Debug)]
pub enum Meanwhile {
    Nothing,
    /// A host, who was asked or another, is killed after so many microseconds.
    Killed(u8, u16),
    /// Another one does this.
    Other(Step),
}

#[derive(Clone, Debug)]
pub enum Deed {
    Do {
        by: u8,
        step: Step,
        /// By a worker of its engine, where it gets something.
        loads: bool,
        meanwhile: Meanwhile,
    },
    /// What is between two hosts does something to their bytes, every so often.
    Trouble {
        from: u8,
        to: u8,
        kind: u8,
        number: u8,
    },
    /// All is well again between all.
    Calm,
    /// All connections end.
    Cut,
    /// What knows the hosts says nothing any more, until all is calm.
    NoEtcd,
    /// One is closed, or killed.
    Leave { who: u8, killed: bool },
    /// One that has left is back, maybe with its share of the time before.
    Back { who: u8, older: bool },
    /// A block's bytes change in a share.
    Rot { who: u8, ns: u8, key: u8, at: u16 },
    /// Nobody asks for anything for so many milliseconds: blocks may move.
    Rest(u16),
}

pub fn shape(rng: &mut Rng) -> Shape {
    Shape {
        hosts: rng.between(2, 4) as u8,
        replicas: rng.between(1, 2) as u8,
        etcd: rng.once_in(3),
        cached: rng.once_in(3),
        backed: rng.once_in(6),
        lasts: rng.once_in(2),
        keyed: rng.once_in(3),
        roomy: !rng.once_in(5),
    }
}

pub fn deeds(rng: &mut Rng) -> Vec<Deed> {
    let count = rng.between(6, 30);
    (0..count).map(|_| deed(rng)).collect()
}

fn deed(rng: &mut Rng) -> Deed {
    let who = rng.below(4) as u8;
    match rng.below(29) {
        0..14 => Deed::Do {
            by: who,
            step: step(rng),
            loads: rng.once_in(2),
            meanwhile: match rng.below(12) {
                0..3 => Meanwhile::Killed(rng.below(4) as u8, rng.below(10_000) as u16),
                3..6 => Meanwhile::Other(step(rng)),
                _ => Meanwhile::Nothing,
            },
        },
        14..18 => Deed::Trouble {
            from: who,
            to: rng.below(4) as u8,
            kind: rng.bits() as u8,
            number: rng.between(1, 12) as u8,
        },
        18..20 => Deed::Calm,
        20 => Deed::Cut,
        21..23 => Deed::Leave {
            who,
            killed: rng.once_in(2),
        },
        23..26 => Deed::Back {
            who,
            older: rng.once_in(2),
        },
        26 => Deed::Rot {
            who,
            ns: u8::from(rng.once_in(4)),
            key: rng.below(16) as u8,
            at: rng.bits() as u16,
        },
        27 => Deed::NoEtcd,
        _ => Deed::Rest(*rng.pick(&[20, 300, 1500, 2500])),
    }
}

pub fn simpler(deed: &Deed) -> Vec<Deed> {
    match deed {
        Deed::Do {
            meanwhile: Meanwhile::Nothing,
            ..
        } => Vec::new(),
        Deed::Do {
            by, step, loads, ..
        } => vec![Deed::Do {
            by: *by,
            step: step.clone(),
            loads: *loads,
            meanwhile: Meanwhile::Nothing,
        }],
        Deed::Leave { who, killed: true } => vec![Deed::Leave {
            who: *who,
            killed: false,
        }],
        Deed::Back { who, older: true } => vec![Deed::Back {
            who: *who,
            older: false,
        }],
        Deed::Rest(time) if *time > 20 => vec![Deed::Rest(20)],
        _ => Vec::new(),
    }
}

pub fn plainer(shape: &Shape) -> Vec<Shape> {
    changed(
        shape,
        &[
            |shape| shape.cached = false,
            |shape| shape.backed = false,
            |shape| shape.keyed = false,
            |shape| shape.etcd = false,
            |shape| shape.replicas = 1,
            |shape| shape.hosts = 2,
        ],
    )
}
