//! What a pool answers, case by case.

use crate::common::Random;
use kvdepot_alloc::{Error, Extent, Hint, MAX_SIZE, Pool};

const fn extent(offset: u64, len: u64) -> Extent {
    Extent { offset, len }
}

/// A pool of 1000 bytes in which exactly these ranges are free.
fn with_free(free: &[Extent]) -> Pool {
    let (mut live, mut at) = (Vec::new(), 0);
    for gap in free.iter().chain([&extent(1000, 0)]) {
        if gap.offset > at {
            live.push(extent(at, gap.offset - at));
        }
        at = gap.end();
    }
    Pool::rebuild(1000, 1, live).unwrap()
}

fn free_of(pool: &Pool) -> Vec<Extent> {
    pool.check().unwrap();
    pool.free_extents().collect()
}

#[test]
fn shapes_that_make_no_sense_are_refused() {
    for granule in [0, 3, 4097] {
        assert_eq!(
            Pool::new(1 << 20, granule).unwrap_err(),
            Error::Granule { granule }
        );
    }
    for (size, granule) in [
        (0, 1),
        (4095, 4096),
        (4097, 4096),
        (MAX_SIZE + 1, 1),
        (2048, 4096),
    ] {
        assert_eq!(
            Pool::new(size, granule).unwrap_err(),
            Error::Size { size, granule }
        );
    }
}

#[test]
fn requests_that_no_pool_can_serve_are_refused() {
    let mut pool = Pool::new(1 << 20, 4096).unwrap();
    assert_eq!(pool.allocate(0), Err(Error::ZeroSize));
    assert_eq!(pool.allocate_near(0, 0), Err(Error::ZeroSize));
    assert_eq!(pool.allocate_scattered(0, 4, None), Err(Error::ZeroSize));
    for requested in [(1 << 20) + 1, u64::MAX] {
        let error = Error::TooLarge {
            requested,
            size: 1 << 20,
        };
        assert_eq!(pool.allocate(requested), Err(error));
        assert_eq!(pool.allocate_scattered(requested, 4, None), Err(error));
    }
    for max_extents in [0, 9, usize::MAX] {
        let error = Error::ExtentLimit { max_extents };
        assert_eq!(pool.allocate_scattered(4096, max_extents, None), Err(error));
    }
    assert_eq!(pool.free_bytes(), 1 << 20);
}

#[test]
fn a_whole_pool_fits_at_the_limits_of_either_width() {
    let narrow = u64::from(u32::MAX);
    for granules in [1, 31, 32, narrow - 1, narrow, narrow + 1, MAX_SIZE] {
        let mut pool = Pool::new(granules, 1).unwrap();
        let whole = pool.allocate(granules).unwrap();
        assert_eq!(whole, extent(0, granules));
        let full = Error::Full {
            requested: 1,
            free: 0,
        };
        assert_eq!(pool.allocate(1), Err(full));
        pool.check().unwrap();
        pool.free(0).unwrap();
        assert_eq!(free_of(&pool), [extent(0, granules)]);
    }
}

#[test]
fn freeing_what_is_not_live_is_an_error_and_changes_nothing() {
    let mut pool = Pool::new(1 << 20, 4096).unwrap();
    let a = pool.allocate(8192).unwrap();
    let b = pool.allocate(4096).unwrap();
    // Inside an extent, off the granule, free, at and beyond the end.
    for offset in [4096, 1, b.end(), 1 << 20, u64::MAX] {
        assert_eq!(pool.free(offset), Err(Error::NotLive { offset }));
    }
    pool.free(a.offset).unwrap();
    assert_eq!(
        pool.free(a.offset),
        Err(Error::NotLive { offset: a.offset })
    );
    assert_eq!(pool.live_extents().collect::<Vec<_>>(), [b]);
    pool.check().unwrap();
}

#[test]
fn an_allocation_of_the_size_freed_before_takes_its_place() {
    let mut pool = with_free(&[extent(0, 100), extent(900, 40)]);
    let live = pool.allocate(60).unwrap();
    assert_eq!(live, extent(0, 60));
    pool.free(0).unwrap();
    // Free, and merged for all who ask.
    assert_eq!(free_of(&pool), [extent(0, 100), extent(900, 40)]);
    assert_eq!(
        (pool.largest_free_extent(), pool.report().free_extents),
        (100, 2)
    );
    assert_eq!(pool.allocate(60).unwrap(), live);
    pool.free(0).unwrap();
    assert_eq!(pool.allocate(100).unwrap(), extent(0, 100));
    pool.check().unwrap();
}

#[test]
fn freed_extents_merge_with_both_neighbours() {
    // Every order of freeing five neighbours ends in one free extent.
    for order in 0..120 {
        let mut pool = Pool::new(5 * 64, 64).unwrap();
        let mut live: Vec<_> = (0..5).map(|_| pool.allocate(64).unwrap()).collect();
        let mut order = order;
        while !live.is_empty() {
            let victim = live.swap_remove(order % live.len());
            order /= live.len() + 1;
            pool.free(victim.offset).unwrap();
            pool.check().unwrap();
        }
        assert_eq!(free_of(&pool), [extent(0, 320)]);
    }
}

#[test]
fn the_tightest_free_extent_is_used() {
    let mut pool = with_free(&[
        extent(0, 300),
        extent(400, 200),
        extent(700, 201),
        extent(950, 50),
    ]);
    assert_eq!(pool.allocate(51).unwrap(), extent(400, 51));
    assert_eq!(pool.allocate(200).unwrap(), extent(700, 200));
    assert_eq!(pool.allocate(1).unwrap(), extent(900, 1));
}

#[test]
fn an_extent_that_is_hardly_too_small_for_its_bin_mate_is_passed_over() {
    // 1030 and 1050 granules share a bin: 1050 must not be served from 1030, nor refused.
    let live = [extent(1030, 10), extent(2090, 10), extent(3200, 96_800)];
    let mut pool = Pool::rebuild(100_000, 1, live).unwrap();
    assert_eq!(
        free_of(&pool),
        [extent(0, 1030), extent(1040, 1050), extent(2100, 1100)]
    );
    assert_eq!(pool.allocate(1050).unwrap(), extent(1040, 1050));
    assert_eq!(pool.allocate(1050).unwrap(), extent(2100, 1050));
    let full = Error::Full {
        requested: 1050,
        free: 1080,
    };
    assert_eq!(pool.allocate(1050), Err(full));
    assert_eq!(pool.allocate(1030).unwrap(), extent(0, 1030));
}

#[test]
fn a_hint_places_behind_its_neighbour_or_is_ignored() {
    let mut pool = with_free(&[extent(100, 60), extent(500, 300)]);
    // Unhinted, the first gap is the tighter one. The neighbour of the second starts at 160.
    assert_eq!(pool.allocate_near(50, 160).unwrap(), extent(500, 50));
    assert_eq!(pool.allocate_near(50, 500).unwrap(), extent(550, 50));
    // Too little room behind, no live extent there, an offset that is nowhere.
    assert_eq!(pool.allocate_near(61, 0).unwrap(), extent(600, 61));
    assert_eq!(pool.allocate_near(10, 3).unwrap(), extent(100, 10));
    assert_eq!(pool.allocate_near(10, u64::MAX).unwrap(), extent(110, 10));
    // The hint holds for scattered allocations that fit into one extent.
    assert_eq!(
        *pool.allocate_scattered(20, 4, Some(600)).unwrap(),
        [extent(661, 20)]
    );
    pool.check().unwrap();
}

#[test]
fn what_others_will_follow_lies_where_they_fit_or_in_the_largest_free_extent() {
    let mut pool = with_free(&[extent(100, 20), extent(200, 60), extent(500, 100)]);
    let hint = |followed_by| Hint {
        behind: None,
        followed_by,
    };
    assert_eq!(pool.allocate_near(10, hint(40)).unwrap(), extent(200, 10));
    assert_eq!(
        pool.allocate_near(10, hint(1 << 40)).unwrap(),
        extent(500, 10)
    );
    // A hint never refuses: this fits nowhere else.
    assert_eq!(
        pool.allocate_near(90, hint(u64::MAX)).unwrap(),
        extent(510, 90)
    );
    assert_eq!(pool.allocate_near(20, hint(0)).unwrap(), extent(100, 20));
    pool.check().unwrap();
}

#[test]
fn scattering_takes_few_large_pieces_and_only_when_nothing_fits() {
    let free = [
        extent(0, 100),
        extent(200, 50),
        extent(300, 80),
        extent(400, 60),
        extent(900, 100),
    ];
    let mut pool = with_free(&free);
    // One of two equals.
    assert_eq!(
        *pool.allocate_scattered(100, 4, None).unwrap(),
        [extent(900, 100)]
    );
    // The two largest are taken whole and reported by address, the rest comes from the best fit.
    let pieces = pool.allocate_scattered(230, 4, None).unwrap();
    assert_eq!(*pieces, [extent(0, 100), extent(300, 80), extent(200, 50)]);
    assert_eq!(pieces.bytes(), 230);
    assert_eq!(free_of(&pool), [extent(400, 60)]);
    // The pieces are extents like any others.
    for piece in &pieces {
        assert_eq!(pool.get(piece.offset), Some(*piece));
        pool.free(piece.offset).unwrap();
    }
    assert_eq!(pool.free_bytes(), 290);
}

#[test]
fn scattering_takes_nothing_unless_the_pieces_suffice() {
    let free = [
        extent(0, 100),
        extent(200, 50),
        extent(300, 80),
        extent(400, 60),
        extent(900, 100),
    ];
    let mut pool = with_free(&free);
    for (len, max, suffices) in [
        (391, 8, false),
        (390, 4, false),
        (341, 4, false),
        (340, 4, true),
        (281, 3, false),
        (201, 2, false),
        (101, 1, false),
    ] {
        let mut pool = pool.clone();
        let result = pool.allocate_scattered(len, max, None);
        if suffices {
            assert_eq!(result.unwrap().len(), max);
        } else {
            let full = Error::Full {
                requested: len,
                free: 390,
            };
            assert_eq!(result, Err(full));
            assert_eq!(free_of(&pool), free);
        }
    }
    assert_eq!(pool.allocate_scattered(390, 5, None).unwrap().len(), 5);
    assert_eq!(pool.free_bytes(), 0);
}

#[test]
fn a_rebuilt_pool_has_the_same_extents_in_whatever_order_they_come() {
    let (size, granule) = (1 << 30, 4096);
    let mut random = Random(3);
    let mut pool = Pool::new(size, granule).unwrap();
    let mut offsets = Vec::new();
    while let Ok(extent) = pool.allocate(1 + random.below(1 << 18)) {
        offsets.push(extent.offset);
    }
    for _ in 0..offsets.len() / 2 {
        let victim = random.below(offsets.len() as u64) as usize;
        pool.free(offsets.swap_remove(victim)).unwrap();
    }
    let mut live: Vec<_> = pool.live_extents().collect();
    assert!(live.is_sorted() && live.len() > 3000);
    for _ in 0..3 {
        let mut rebuilt = Pool::rebuild(size, granule, live.iter().copied()).unwrap();
        assert_eq!(free_of(&rebuilt), free_of(&pool));
        assert!(rebuilt.live_extents().eq(pool.live_extents()));
        assert_eq!(rebuilt.free_bytes(), pool.free_bytes());
        assert_eq!(rebuilt.largest_free_extent(), pool.largest_free_extent());
        // It goes on from the same extent or an equal one.
        let same = pool.clone().allocate(5000).map(|extent| extent.len);
        assert_eq!(rebuilt.allocate(5000).map(|extent| extent.len), same);
        rebuilt.check().unwrap();
        for at in (1..live.len()).rev() {
            live.swap(at, random.below(at as u64 + 1) as usize);
        }
    }
}

#[test]
fn rebuilding_from_nothing_or_everything_works() {
    let empty = Pool::rebuild(1 << 20, 4096, []).unwrap();
    assert_eq!(free_of(&empty), [extent(0, 1 << 20)]);
    let full = Pool::rebuild(1 << 20, 4096, [extent(0, 1 << 20)]).unwrap();
    assert_eq!(free_of(&full), []);
    let wide = Pool::rebuild(1 << 40, 1, [extent(1 << 39, 1)]).unwrap();
    assert_eq!(
        free_of(&wide),
        [extent(0, 1 << 39), extent((1 << 39) + 1, (1 << 39) - 1)]
    );
}

#[test]
fn extents_that_no_pool_handed_out_are_refused_by_a_rebuild() {
    let rebuild = |live: &[Extent]| Pool::rebuild(1 << 20, 4096, live.to_vec()).unwrap_err();
    let granule = 4096;
    assert_eq!(rebuild(&[extent(0, 0)]), Error::ZeroSize);
    for extent in [extent(1, 4096), extent(0, 4095)] {
        assert_eq!(rebuild(&[extent]), Error::Misaligned { extent, granule });
    }
    let size = 1 << 20;
    for extent in [
        extent(size, 4096),
        extent(size - 4096, 8192),
        extent(1 << 63, 1 << 63),
    ] {
        assert_eq!(rebuild(&[extent]), Error::OutOfRange { extent, size });
    }
    let (first, second) = (extent(0, 8192), extent(4096, 4096));
    assert_eq!(
        rebuild(&[second, extent(65536, 4096), first]),
        Error::Overlap { first, second }
    );
    assert_eq!(
        rebuild(&[first, first]),
        Error::Overlap {
            first,
            second: first
        }
    );
}

#[test]
fn the_report_is_exact() {
    let pool = with_free(&[
        extent(0, 100),
        extent(200, 64),
        extent(300, 1),
        extent(999, 1),
    ]);
    let report = pool.report();
    assert_eq!((report.size, report.granule), (1000, 1));
    assert_eq!((report.live_bytes, report.free_bytes), (834, 166));
    assert_eq!((report.live_extents, report.free_extents), (3, 4));
    assert_eq!(report.largest_free_extent, 100);
    let mut histogram = [0; 64];
    (histogram[0], histogram[6]) = (2, 2);
    assert_eq!(report.free_histogram, histogram);
    assert!((report.fragmentation() - (1.0 - 100.0 / 166.0)).abs() < 1e-12);
    assert!((report.utilisation() - 0.834).abs() < 1e-12);
    let empty = Pool::new(64, 64).unwrap().report();
    assert_eq!((empty.fragmentation(), empty.utilisation()), (0.0, 0.0));
    let full = Pool::rebuild(64, 64, [extent(0, 64)]).unwrap().report();
    assert_eq!((full.fragmentation(), full.utilisation()), (0.0, 1.0));
}

#[test]
fn memory_stays_below_32_bytes_a_live_extent() {
    let mut pool = Pool::new(1 << 40, 4096).unwrap();
    let mut most = 0.0_f64;
    for count in 1..=300_000 {
        pool.allocate(1 << 21).unwrap();
        if count > 10_000 {
            most = most.max(pool.report().memory_bytes as f64 / f64::from(count));
        }
    }
    assert!(most <= 32.0, "{most} bytes");
    // Every other one freed: as many free extents as live ones is as splintered as it gets.
    for offset in (0..300_000).step_by(2).map(|index| index << 21) {
        pool.free(offset).unwrap();
    }
    let report = pool.report();
    assert_eq!(
        (report.live_extents, report.free_extents),
        (150_000, 150_001)
    );
    pool.check().unwrap();
}

#[test]
fn reserved_room_is_not_reallocated() {
    let mut pool = Pool::new(1 << 30, 4096).unwrap();
    pool.reserve(50_000, 25_001);
    let before = pool.report().memory_bytes;
    let live: Vec<_> = (0..50_000).map(|_| pool.allocate(4096).unwrap()).collect();
    live.iter()
        .step_by(2)
        .for_each(|extent| pool.free(extent.offset).unwrap());
    assert_eq!(pool.report().memory_bytes, before);
    assert_eq!(pool.report().free_extents, 25_001);
}

#[test]
fn errors_say_what_was_given_and_what_is_allowed() {
    let e = extent(4096, 12288);
    for (error, words) in [
        (
            Error::Full {
                requested: 4096,
                free: 100,
            },
            vec!["4096", "100"],
        ),
        (Error::ZeroSize, vec!["0 bytes", "at least 1"]),
        (
            Error::TooLarge {
                requested: 9,
                size: 8,
            },
            vec!["9 bytes", "has 8"],
        ),
        (
            Error::NotLive { offset: 77 },
            vec!["offset 77", "already freed"],
        ),
        (
            Error::Overlap {
                first: e,
                second: e,
            },
            vec!["4096+12288", "overlap"],
        ),
        (
            Error::Misaligned {
                extent: e,
                granule: 8192,
            },
            vec!["4096+12288", "8192"],
        ),
        (
            Error::OutOfRange {
                extent: e,
                size: 8192,
            },
            vec!["4096+12288", "8192"],
        ),
        (
            Error::Granule { granule: 3 },
            vec!["3 bytes", "powers of two"],
        ),
        (
            Error::Size {
                size: 5,
                granule: 4,
            },
            vec!["5 bytes", "multiples", "4"],
        ),
        (
            Error::ExtentLimit { max_extents: 9 },
            vec!["is 9", "1 to 8"],
        ),
        (Error::TooMany { limit: 5 }, vec!["maximum", "5"]),
    ] {
        let text = error.to_string();
        for word in words {
            assert!(text.contains(word), "{text:?} lacks {word:?}");
        }
    }
}
