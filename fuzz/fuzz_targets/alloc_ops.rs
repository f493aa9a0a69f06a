//! Arbitrary operations on pools of several shapes, each answer compared with ordered maps, and the
//! pool's own check after each.

#![no_main]

use arbitrary::Arbitrary;
use kvdepot_alloc::Pool;
use libfuzzer_sys::fuzz_target;
use twin::{Allocator, Twin};

#[path = "../../crates/alloc/tests/common/twin.rs"]
mod twin;

/// Size and granule: narrow and wide numbers, bins with one size and with many.
#[derive(Debug, Clone, Copy, Arbitrary)]
enum Shape {
    Tiny,
    Odd,
    Pages,
    Narrow,
    Wide,
    Huge,
}

#[derive(Debug, Arbitrary)]
enum Op {
    Allocate(Len),
    Near(Len, u16),
    Scattered(Len, u8, Option<u16>),
    Free(u16),
    FreeAnywhere(u64),
    Rebuild,
}

/// A request: a fraction of the pool, so that the same input fits every shape.
#[derive(Debug, Clone, Copy, Arbitrary)]
enum Len {
    Exactly(u64),
    Granules(u8),
    Share(u16),
}

impl Shape {
    const fn get(self) -> (u64, u64) {
        match self {
            Self::Tiny => (64, 1),
            Self::Odd => (5_000, 1),
            Self::Pages => (1 << 20, 4096),
            Self::Narrow => (3 << 30, 1 << 12),
            Self::Wide => ((1 << 40) + 4096, 64),
            Self::Huge => (1 << 63, 1),
        }
    }
}

impl Len {
    fn get(self, (size, granule): (u64, u64)) -> u64 {
        match self {
            Self::Exactly(len) => len,
            Self::Granules(granules) => u64::from(granules) * granule,
            Self::Share(share) => (u128::from(size) * u128::from(share) >> 16) as u64,
        }
    }
}

/// The start of a live extent, at about this share of the pool.
fn pick<A: Allocator>(twin: &Twin<A>, size: u64, share: u16) -> Option<u64> {
    twin.near((u128::from(size) * u128::from(share) >> 16) as u64)
}

/// One operation; the twin compares the answer. That there was no room is one, too.
fn apply<A: Allocator>(twin: &mut Twin<A>, shape: (u64, u64), op: &Op) {
    match *op {
        Op::Allocate(len) => {
            let _compared = twin.allocate(len.get(shape));
        }
        Op::Near(len, near) => {
            let near = pick(twin, shape.0, near).unwrap_or(0);
            let _compared = twin.allocate_near(len.get(shape), near);
        }
        Op::Scattered(len, max, near) => {
            let near = near.and_then(|near| pick(twin, shape.0, near));
            let max = 1 + usize::from(max % 8);
            let _compared = twin.allocate_scattered(len.get(shape), max, near);
        }
        Op::Free(share) => {
            if let Some(offset) = pick(twin, shape.0, share) {
                assert!(twin.free(offset));
            }
        }
        Op::FreeAnywhere(offset) => {
            twin.free(offset);
        }
        Op::Rebuild => {}
    }
    twin.compare();
    twin.pool.check().expect("a whole pool");
}

fuzz_target!(|input: (Shape, Vec<Op>)| {
    let (shape, ops) = input;
    let shape = shape.get();
    let pool = Pool::new(shape.0, shape.1).expect("a shape that is allowed");
    let mut twin = Twin::new(pool, shape.0, shape.1);
    for op in &ops {
        apply(&mut twin, shape, op);
        if matches!(op, Op::Rebuild) {
            twin.rebuild();
        }
    }
    twin.compare_all();
});
