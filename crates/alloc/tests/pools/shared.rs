//! The shared pool and the handles that free themselves.
use crate::common::Random;
use kvdepot_alloc::{Error, Handle, Pool, Shared};
use std::thread;

#[test]
fn a_handle_frees_when_dropped() {
    let pool = Shared::new(1 << 20, 4096).unwrap();
    let handle = pool.allocate_owned(10_000).unwrap();
    assert_eq!(handle.extents().bytes(), 12_288);
    assert_eq!(pool.live_extents(), handle.extents().to_vec());
    drop(handle);
    assert_eq!(pool.largest_free_extent(), 1 << 20);
}

#[test]
fn a_scattered_handle_frees_every_piece() {
    let pool = Shared::new(8 * 4096, 4096).unwrap();
    let mut live: Vec<_> = (0..8).map(|_| pool.allocate_owned(4096).unwrap()).collect();
    (0..4).for_each(|index| drop(live.remove(index)));
    assert_eq!(
        (pool.free_bytes(), pool.largest_free_extent()),
        (4 * 4096, 4096)
    );
    let scattered = pool.allocate_scattered_owned(3 * 4096, 4, None).unwrap();
    assert_eq!(scattered.extents().len(), 3);
    assert_eq!(pool.free_bytes(), 4096);
    scattered.free().unwrap();
    assert_eq!(pool.free_bytes(), 4 * 4096);
    pool.check().unwrap();
}

#[test]
fn a_handle_outlives_its_pool_without_harm() {
    let pool = Shared::new(1 << 20, 4096).unwrap();
    let (first, second) = (
        pool.allocate_owned(1).unwrap(),
        pool.allocate_owned(1).unwrap(),
    );
    assert!(first.is_attached());
    drop(pool);
    assert!(!first.is_attached());
    assert_eq!(first.extents().bytes(), 4096);
    assert_eq!(first.free(), Ok(()));
    drop(second);
}

#[test]
fn extents_that_leave_their_handle_stay_live() {
    let pool = Shared::new(1 << 20, 4096).unwrap();
    let extents = pool.allocate_owned(4096).unwrap().into_extents();
    assert_eq!(pool.get(extents[0].offset), Some(extents[0]));
    pool.free(extents[0].offset).unwrap();
    assert_eq!(pool.free_bytes(), pool.size());
}

#[test]
fn a_handle_reports_that_it_was_freed_behind_its_back() {
    let pool = Shared::from(Pool::new(1 << 20, 4096).unwrap());
    let handle = pool.allocate_owned(4096).unwrap();
    let offset = handle.extents()[0].offset;
    pool.free(offset).unwrap();
    assert_eq!(handle.free(), Err(Error::NotLive { offset }));
    assert_eq!(pool.report().live_extents, 0);
}

/// Allocates and drops at random, and checks that nobody else was given the same bytes.
fn churn(pool: &Shared, seed: u64) -> Vec<Handle> {
    let mut random = Random(seed);
    let mut mine: Vec<Handle> = Vec::new();
    for _ in 0..if cfg!(miri) { 50 } else { 5_000 } {
        let len = 1 + random.below(64 * 4096);
        if mine.len() > 20 || random.below(3) == 0 {
            if !mine.is_empty() {
                let victim = random.below(mine.len() as u64) as usize;
                mine.swap_remove(victim).free().unwrap();
            }
        } else if let Ok(handle) = pool.allocate_scattered_owned(len, 4, None) {
            mine.push(handle);
        }
    }
    mine
}

#[test]
fn threads_never_share_an_extent() {
    let pool = Shared::new(1 << 23, 4096).unwrap();
    let mut all: Vec<Handle> = thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|seed| {
                let pool = &pool;
                scope.spawn(move || churn(pool, seed))
            })
            .collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect()
    });
    pool.check().unwrap();
    let mut extents: Vec<_> = all
        .iter()
        .flat_map(|handle| handle.extents().to_vec())
        .collect();
    extents.sort_unstable();
    assert_eq!(extents, pool.live_extents());
    all.clear();
    assert_eq!(pool.largest_free_extent(), 1 << 23);
}
