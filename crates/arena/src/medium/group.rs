//! Writes to a medium in groups: whoever finds nobody at it takes all that wait, writes them, and
//! syncs once for all. Who comes meanwhile is in the next group, so that nothing is synced by a
//! sync that began before it was written.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use kvdepot_host::Condvar;
use parking_lot::{Mutex, MutexGuard};

use crate::held;

/// What one call wants written: bytes at offsets, none of which reaches over the end of a page.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) pieces: Vec<(u64, Vec<u8>)>,
    /// Whether this, and what the caller has written before, shall be durable.
    pub(super) durable: bool,
}

/// What became of an order: of each piece whether it is written, and whether all is durable.
#[derive(Clone, Debug, Default)]
pub(super) struct Done {
    pub(super) written: Vec<bool>,
    pub(super) synced: bool,
}

#[derive(Debug, Default)]
pub(super) struct Groups {
    queue: Mutex<Queue>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    /// Number of the next order.
    next: u64,
    waiting: Vec<(u64, Order)>,
    /// Whether somebody is at a group.
    busy: bool,
    done: HashMap<u64, Done>,
}

impl Groups {
    /// Has an order done, by `work` of this call or another one's, which answers each order of a
    /// group.
    pub(super) fn have(&self, order: Order, work: impl Fn(&[(u64, Order)]) -> Vec<Done>) -> Done {
        held::may_wait();
        let mut queue = self.queue.lock();
        let number = queue.next;
        queue.next += 1;
        queue.waiting.push((number, order));
        loop {
            if let Some(done) = queue.done.remove(&number) {
                return done;
            }
            if queue.busy {
                self.ended.wait(&mut queue);
                continue;
            }
            queue.busy = true;
            let group = std::mem::take(&mut queue.waiting);
            // A panic is this call's alone: the others' orders are answered as not done.
            let work = AssertUnwindSafe(|| work(&group));
            let done = MutexGuard::unlocked(&mut queue, || catch_unwind(work));
            let undone = |order: &Order| Done {
                written: vec![false; order.pieces.len()],
                synced: false,
            };
            let (done, panic) = match done {
                Ok(done) => (done, None),
                Err(panic) => {
                    let orders = group.iter().map(|(_, order)| undone(order));
                    (orders.collect(), Some(panic))
                }
            };
            let numbers = group.into_iter().map(|(number, _)| number);
            queue.done.extend(numbers.zip(done));
            queue.busy = false;
            self.ended.notify_all();
            if let Some(panic) = panic {
                drop(queue);
                resume_unwind(panic);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn orders_that_come_while_one_is_written_are_one_group() {
        const OTHERS: usize = 5;
        let groups = Groups::default();
        let (began, goes_on) = (Barrier::new(2), Barrier::new(2));
        let (rounds, largest) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let order = |at: u64| Order {
            pieces: vec![(at, vec![1])],
            durable: true,
        };
        let work = |group: &[(u64, Order)]| {
            if rounds.fetch_add(1, Ordering::SeqCst) == 0 {
                began.wait();
                goes_on.wait();
            }
            largest.fetch_max(group.len(), Ordering::SeqCst);
            let done = |(_, order): &(u64, Order)| Done {
                written: vec![order.pieces[0].0 != 3],
                synced: true,
            };
            group.iter().map(done).collect()
        };
        std::thread::scope(|scope| {
            scope.spawn(|| groups.have(order(100), work));
            began.wait();
            let (groups, work) = (&groups, &work);
            let others = (0..OTHERS as u64).map(|at| {
                scope.spawn(move || assert_eq!(groups.have(order(at), work).written, [at != 3]))
            });
            let others: Vec<_> = others.collect();
            while groups.queue.lock().waiting.len() < OTHERS {
                std::thread::yield_now();
            }
            goes_on.wait();
            others.into_iter().for_each(|other| other.join().unwrap());
        });
        assert_eq!(rounds.into_inner(), 2);
        assert_eq!(largest.into_inner(), OTHERS);
        assert!(groups.queue.lock().done.is_empty());
    }
}
