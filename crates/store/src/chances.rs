//! How likely blocks are asked for that nobody has seen yet, by where they lie in their call.
//!
//! A prompt's first blocks are shared by more prompts than its last ones, and what lies deep is
//! asked for seldom. How seldom depends on who asks: so it is counted, for the blocks that are
//! stored as for those that are not. Counts fade, and nothing is decided by few. Advice only: the
//! counts are not taken together.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::ghosts::{CLASSES, ROUND};

/// The class of a call's last block: an engine may call part of a block its last one.
const LAST: usize = CLASSES - 1;
/// The class of what was offered before anybody counted.
pub(crate) const UNKNOWN: u8 = CLASSES as u8 - 2;
/// Classes of depth, each half as deep again as the one before.
const DEPTHS: usize = CLASSES - 2;

/// Counts fade by an eighth as often as this many steps pass.
const PERIOD: u64 = ROUND / 8;
/// Blocks that a judgement is made of at least.
const EVIDENCE: u32 = 32;
/// At most so many hundredths of what is offered are declined for their depth: measured on a trace
/// of conversations, more costs hits in a depot that has most of them.
const SHARE: u64 = 30;
/// One call in so many is not judged by its depth, so that what follows is seen, too.
const SAMPLE: u32 = 32;

/// The counts, and what follows from them.
pub(crate) struct Chances {
    offered: [AtomicU32; CLASSES],
    asked: [AtomicU32; CLASSES],
    calls: AtomicU32,
    /// When the counts fade next.
    next: AtomicU64,
    /// The first class of depth that is not worth its room.
    end: AtomicU32,
    /// Whether a call's last block is not.
    is_last_poor: AtomicBool,
}

impl Chances {
    pub(crate) fn new() -> Chances {
        let zeros = || std::array::from_fn(|_| AtomicU32::new(0));
        Chances {
            offered: zeros(),
            asked: zeros(),
            calls: AtomicU32::new(0),
            next: AtomicU64::new(PERIOD),
            end: AtomicU32::new(DEPTHS as u32),
            is_last_poor: AtomicBool::new(false),
        }
    }

    /// The class of the block at `depth` among those of a call that were not there.
    pub(crate) fn class(depth: usize, is_last: bool) -> u8 {
        if is_last && depth > 0 {
            return LAST as u8;
        }
        let place = depth + 1;
        let power = place.ilog2();
        let half = if power > 0 {
            place >> (power - 1) & 1
        } else {
            0
        };
        (2 * power as usize + half).min(DEPTHS - 1) as u8
    }

    /// Notes that a block was offered.
    pub(crate) fn offered(&self, class: u8) {
        self.offered[usize::from(class)].fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that one was asked for, so many steps after it was offered.
    pub(crate) fn asked(&self, class: u8, steps: u64) {
        // Later it would have left.
        if steps <= ROUND {
            self.asked[usize::from(class)].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether the next call is judged at all.
    pub(crate) fn judges(&self) -> bool {
        !self
            .calls
            .fetch_add(1, Ordering::Relaxed)
            .is_multiple_of(SAMPLE)
    }

    /// Whether blocks of a class are not worth that others go for them.
    pub(crate) fn are_poor(&self, class: u8) -> bool {
        match usize::from(class) {
            LAST => self.is_last_poor.load(Ordering::Relaxed),
            _ => class != UNKNOWN && u32::from(class) >= self.end.load(Ordering::Relaxed),
        }
    }

    /// Judges anew, where it is time for it.
    pub(crate) fn pass(&self, now: u64) {
        let next = self.next.load(Ordering::Relaxed);
        let later = now + PERIOD;
        let mine = now >= next
            && self
                .next
                .compare_exchange(next, later, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        if !mine {
            return;
        }
        let read = |counts: &[AtomicU32; CLASSES], class: usize| -> u64 {
            counts[class].load(Ordering::Relaxed).into()
        };
        let classes = (0..DEPTHS).chain([LAST]);
        let (all, hits) = classes.fold((0, 0), |(all, hits), class| {
            (
                all + read(&self.offered, class),
                hits + read(&self.asked, class),
            )
        });
        let is_poor =
            |offered: u64, asked: u64| offered >= EVIDENCE.into() && asked * all < hits * offered;
        let (mut offered, mut asked, mut end) = (0, 0, DEPTHS);
        // The first block of a call is never poor: without it there is no second one.
        for class in (1..DEPTHS).rev() {
            offered += read(&self.offered, class);
            asked += read(&self.asked, class);
            if offered * 100 > all * SHARE {
                break;
            }
            if is_poor(offered, asked) {
                end = class;
            }
        }
        self.end.store(end as u32, Ordering::Relaxed);
        let is_last_poor = is_poor(read(&self.offered, LAST), 2 * read(&self.asked, LAST));
        self.is_last_poor.store(is_last_poor, Ordering::Relaxed);
        for count in self.offered.iter().chain(&self.asked) {
            // What is counted meanwhile may be lost.
            let left = count.load(Ordering::Relaxed);
            count.store(left - left.div_ceil(8), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_grow_with_the_depth_and_the_last_block_is_one() {
        let depths: Vec<u8> = (0..12).map(|depth| Chances::class(depth, false)).collect();
        assert_eq!(depths, [0, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7]);
        assert_eq!(Chances::class(1 << 40, false), DEPTHS as u8 - 1);
        assert_eq!(Chances::class(9, true), LAST as u8);
        assert_eq!(
            Chances::class(0, true),
            0,
            "a call's first block is its head"
        );
    }

    /// Calls of 31 blocks; those before `read` are asked for.
    fn learn(chances: &Chances, read: usize, calls: std::ops::Range<u64>) {
        for call in calls {
            for depth in 0..31 {
                let class = Chances::class(depth, false);
                chances.offered(class);
                if depth < read {
                    chances.asked(class, 1);
                }
            }
            chances.pass(call * PERIOD / 8);
        }
    }

    #[test]
    fn what_lies_deep_is_poor_while_it_is_asked_for_less_and_never_more_than_its_share() {
        let chances = Chances::new();
        learn(&chances, 8, 0..200);
        let poor = |depth| chances.are_poor(Chances::class(depth, false));
        // From the eighth of 31 on all are unread; the last eight are a class, and two too many.
        assert!(poor(30) && poor(23) && !poor(22) && !poor(0));
        learn(&chances, 31, 200..800);
        assert!(!poor(30), "all are asked for alike");
        learn(&chances, 0, 800..2000);
        assert!(!poor(30), "none is asked for");
    }

    #[test]
    fn a_late_question_does_not_count_and_one_call_in_some_is_not_judged() {
        let chances = Chances::new();
        chances.asked(3, ROUND + 1);
        assert_eq!(chances.asked[3].load(Ordering::Relaxed), 0);
        let judged = (0..SAMPLE).filter(|_| chances.judges()).count();
        assert_eq!(judged as u32, SAMPLE - 1);
    }
}
