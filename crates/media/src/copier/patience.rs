//! Legs whose carriers are waited for so long and no longer.
//!
//! One thread for a copier, started by the first such leg. Legs mostly end long before; what is
//! left of them goes when later ones come.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Something that a carrier is at, and that is waited for so long.
pub(super) trait Expected: Send + Sync {
    /// Waits no longer.
    fn abandon(&self, patience: Duration);
}

/// Who looks at the clock.
#[derive(Default)]
pub(super) struct Watch {
    shared: Arc<Watched>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Watched {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    legs: VecDeque<(Instant, Duration, Weak<dyn Expected>)>,
    started: bool,
    ended: bool,
}

impl Watch {
    /// Abandons a leg when its time is over.
    pub(super) fn expect(&self, leg: Weak<dyn Expected>, patience: Duration) {
        let Some(end) = Instant::now().checked_add(patience) else {
            return;
        };
        let start = {
            let mut state = lock(&self.shared.state);
            while state
                .legs
                .front()
                .is_some_and(|(.., leg)| leg.strong_count() == 0)
            {
                state.legs.pop_front();
            }
            // Mostly it is the last one.
            let after = state.legs.iter().rposition(|(other, ..)| *other <= end);
            let at = after.map_or(0, |at| at + 1);
            state.legs.insert(at, (end, patience, leg));
            if at == 0 {
                self.shared.changed.notify_one();
            }
            !std::mem::replace(&mut state.started, true) && !state.ended
        };
        if !start {
            return;
        }
        let watched = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name("kvdepot-patience".into());
        match thread.spawn(move || watched.run()) {
            Ok(thread) => *lock(&self.thread) = Some(thread),
            // The next leg tries again.
            Err(_) => lock(&self.shared.state).started = false,
        }
    }

    /// Abandons all legs that are under way now.
    pub(super) fn abandon_all(&self) {
        let legs = std::mem::take(&mut lock(&self.shared.state).legs);
        for (_, patience, leg) in legs {
            abandon(&leg, patience);
        }
    }

    /// Whether this is its thread.
    pub(super) fn is_here(&self) -> bool {
        let current = std::thread::current().id();
        let thread = lock(&self.thread);
        thread
            .as_ref()
            .is_some_and(|thread| thread.thread().id() == current)
    }

    /// Ends the thread; nothing is under way.
    pub(super) fn end(&self) {
        lock(&self.shared.state).ended = true;
        self.shared.changed.notify_one();
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            // It panics nowhere; there is no result to look at.
            drop(thread.join());
        }
    }
}

impl Watched {
    fn run(&self) {
        let mut state = lock(&self.state);
        while !state.ended {
            let now = Instant::now();
            state = match state.legs.front().map(|(end, ..)| *end) {
                None => self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(end) if end > now => {
                    let waited = self.changed.wait_timeout(state, end - now);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                Some(_) => {
                    let overdue = state.legs.pop_front();
                    drop(state);
                    if let Some((_, patience, leg)) = overdue {
                        abandon(&leg, patience);
                    }
                    lock(&self.state)
                }
            };
        }
    }
}

/// No code that runs under these locks can panic half way, so poison means nothing.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn abandon(leg: &Weak<dyn Expected>, patience: Duration) {
    if let Some(leg) = leg.upgrade() {
        leg.abandon(patience);
    }
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;

    use super::*;
    use crate::buffer::Buffer;
    use crate::carrier::{Alignment, Carrier, Op, Receipt};
    use crate::checksum::{self, PartId};
    use crate::copier::{Copier, CopierConfig};

    const LEN: usize = 64 << 10;

    /// Answers at once with sevens, or keeps what it is asked for.
    #[derive(Debug)]
    struct Slow {
        patience: Duration,
        hangs: AtomicBool,
        kept: Mutex<Vec<Receipt>>,
    }

    impl Slow {
        fn new(patience: Duration) -> Arc<Slow> {
            Arc::new(Slow {
                patience,
                hangs: AtomicBool::new(true),
                kept: Mutex::default(),
            })
        }

        fn answer(receipts: Vec<Receipt>) {
            for mut receipt in receipts {
                let len = receipt.len();
                if receipt.op() == Op::Read {
                    receipt.fill(0, &vec![7; len]);
                }
                receipt.carried(len);
            }
        }
    }

    impl Carrier for Slow {
        fn alignment(&self) -> Alignment {
            Alignment {
                at: 1,
                memory: None,
            }
        }

        fn patience(&self, _op: Op) -> Option<Duration> {
            Some(self.patience)
        }

        fn carry(self: Arc<Self>, receipts: Vec<Receipt>) {
            match self.hangs.load(Ordering::SeqCst) {
                true => lock(&self.kept).extend(receipts),
                false => Slow::answer(receipts),
            }
        }
    }

    fn copier() -> Copier {
        let config = CopierConfig {
            lanes: 2,
            inline_max: 0,
            staging_slab: Some(4 * LEN as u64),
            staging_regions: Some(4),
            ..CopierConfig::default()
        };
        Copier::new(config).unwrap()
    }

    /// Reads so many parts, or writes them: how many verified, and this process's memory of each.
    fn run(copier: &Copier, slow: &Arc<Slow>, count: usize, op: Op) -> (usize, Vec<Buffer>) {
        let mut batch = copier.batch();
        let id = PartId::whole([1; 16], [2; 32]);
        let sum = checksum::of(&id, &[7; LEN]);
        let mut memory = Vec::new();
        for number in 0..count {
            let carrier = Arc::clone(slow) as Arc<dyn Carrier>;
            let there = Buffer::carried(carrier, number * LEN, LEN, true);
            let here = Buffer::from_vec(vec![7 * u8::from(op == Op::Write); LEN]);
            let (from, to) = match op {
                Op::Read => (there, here.clone()),
                Op::Write => (here.clone(), there),
            };
            memory.push(here);
            batch.part(&id, &[from], &[to], Some(sum), 0).unwrap();
        }
        let (sender, ended) = mpsc::channel();
        let ticket = copier.submit(batch, move |done| {
            let good = done
                .parts()
                .filter(|(_, part)| part.as_ref().is_ok_and(|part| part.matches == Some(true)));
            sender.send(good.count()).unwrap();
        });
        assert!(ticket.wait(Some(Duration::from_secs(60))), "a batch hangs");
        (ended.recv().unwrap(), memory)
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memory files, which a slab is made of")]
    fn what_does_not_answer_fails_and_keeps_nothing_but_its_regions() {
        for op in [Op::Read, Op::Write] {
            let (copier, slow) = (copier(), Slow::new(Duration::from_millis(30)));
            // More than its share of the regions: what waits for one of them fails too.
            let (good, memory) = run(&copier, &slow, 9, op);
            assert_eq!(good, 0);
            let free = copier.free_regions();
            assert!(free >= 1, "others find a region");
            // At once, by now.
            assert_eq!(run(&copier, &slow, 9, op).0, 0);
            let other = Slow::new(Duration::from_secs(60));
            other.hangs.store(false, Ordering::SeqCst);
            assert_eq!(run(&copier, &other, 9, op).0, 9);
            // What comes after all is written into regions alone.
            slow.hangs.store(false, Ordering::SeqCst);
            Slow::answer(std::mem::take(&mut *lock(&slow.kept)));
            let untouched = vec![7 * u8::from(op == Op::Write); LEN];
            assert!(memory.iter().all(|one| one.to_vec() == untouched));
            // A lane lets go of its region behind the end of the batch.
            let deadline = Instant::now() + Duration::from_secs(10);
            while copier.free_regions() < 4 {
                assert!(Instant::now() < deadline, "not every region is back");
                std::thread::yield_now();
            }
            // Unless this machine stands still for as long as the carrier may.
            while run(&copier, &slow, 9, op).0 < 9 {}
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memory files, which a slab is made of")]
    fn who_gives_up_waits_for_no_carrier() {
        let (copier, slow) = (Arc::new(copier()), Slow::new(Duration::from_secs(3600)));
        let reader = {
            let (copier, slow) = (Arc::clone(&copier), Arc::clone(&slow));
            std::thread::spawn(move || run(&copier, &slow, 9, Op::Read).0)
        };
        while lock(&slow.kept).is_empty() {
            std::thread::yield_now();
        }
        copier.give_up();
        assert_eq!(reader.join().unwrap(), 0);
        copier.close();
        drop(std::mem::take(&mut *lock(&slow.kept)));
    }

    /// A carrier without a time limit, which answers when the test has it answer.
    #[derive(Debug, Default)]
    struct Later(Mutex<Vec<Receipt>>);

    impl Carrier for Later {
        fn alignment(&self) -> Alignment {
            Alignment {
                at: 1,
                memory: None,
            }
        }

        fn carry(self: Arc<Self>, receipts: Vec<Receipt>) {
            lock(&self.0).extend(receipts);
        }
    }

    fn behind_one_that_hangs(cancels: bool) {
        let patience = if cancels { 3_600_000 } else { 300 };
        let (copier, slow) = (copier(), Slow::new(Duration::from_millis(patience)));
        let later = Arc::new(Later::default());
        let start = |carrier: Arc<dyn Carrier>, number: usize| {
            let mut batch = copier.batch();
            batch.of_call(7);
            let there = Buffer::carried(carrier, number * LEN, LEN, true);
            let here = Buffer::from_vec(vec![0; LEN]);
            let id = PartId::whole([1; 16], [2; 32]);
            batch.part(&id, &[there], &[here], None, 0).unwrap();
            copier.submit(batch, |_| {})
        };
        // Three have regions, and one waits for one.
        let hangs: Vec<_> = (0..4).map(|n| start(Arc::clone(&slow) as _, n)).collect();
        // One has the last region, and two wait behind that.
        let answers: Vec<_> = (0..3).map(|n| start(Arc::clone(&later) as _, n)).collect();
        let mut cancelled = false;
        let end = Instant::now() + Duration::from_secs(10);
        while answers.iter().any(|one| !one.is_done()) {
            let ended = answers.iter().filter(|one| one.is_done()).count();
            assert!(
                Instant::now() < end,
                "cancels {cancels}: {ended} of 3 have ended, {} regions are free, {} of 4 hang",
                copier.free_regions(),
                hangs.iter().filter(|one| !one.is_done()).count(),
            );
            Slow::answer(std::mem::take(&mut *lock(&later.0)));
            std::thread::yield_now();
            if cancels && !cancelled && copier.free_regions() == 1 {
                hangs.iter().for_each(|one| one.cancel());
                cancelled = true;
            }
        }
        drop(std::mem::take(&mut *lock(&slow.kept)));
    }

    #[test]
    fn parts_behind_a_carrier_that_hangs_go_on_when_its_time_limit_is_over() {
        behind_one_that_hangs(false);
    }

    #[test]
    fn parts_behind_cancelled_ones_go_on() {
        behind_one_that_hangs(true);
    }
}
