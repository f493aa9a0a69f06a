//! How long lookups wait, and locks are held, while puts evict.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvdepot_media::Buffer;
use kvdepot_store::{BlockBuffers, Depot, Key, Namespace, longest_hold};
use serde_json::{Value, json};

use super::{BATCH, Said};
use crate::bench::index::{bare, is_in};
use crate::bench::random::Random;
use crate::error::Error;

/// Bytes of a put.
const PUT: usize = 1 << 20;
/// How long puts are stored.
const SPELL: Duration = Duration::from_millis(1500);
/// Most puts.
const PUTS: usize = 512;

/// Puts during which locks are measured.
pub(super) const HELD: usize = 128;

/// Stores blocks that nobody has stored before.
pub(super) struct Puts {
    random: Random,
    source: Buffer,
}

impl Puts {
    pub(super) fn new(seed: u64) -> Puts {
        Puts {
            random: Random(seed),
            source: Buffer::from_vec(vec![7; PUT]),
        }
    }

    pub(super) fn put(&mut self, ns: &Namespace, count: usize) -> Result<(), Error> {
        for _ in 0..count {
            let buffers = BlockBuffers::whole([self.source.clone()]);
            let stored = ns.put(vec![self.random.key()], buffers)?.wait(None)?;
            if stored.contains(&false) {
                return Err(Error::Bench("a put into a full arena was rejected".into()));
            }
        }
        Ok(())
    }
}

/// `wait_ms`, and `lock_hold_ms` of puts.
pub(super) fn measure(
    depot: &Depot,
    ns: &Namespace,
    keys: &[Key],
    said: &mut Said<'_>,
) -> Result<(), Error> {
    let mut puts = Puts::new(31);
    let mut put = || puts.put(ns, 1);
    // Until it evicts.
    while depot
        .stats()
        .tiers
        .iter()
        .all(|tier| tier.evicted_blocks == 0)
    {
        put()?;
    }
    // The last keys of the order of use have gone; those that are looked up need not be there.
    let (mut count, start) = (0, Instant::now());
    let ask = |keys: &[Key]| ns.contains(keys).is_ok();
    let ours = lookups(keys, ask, || {
        while start.elapsed() < SPELL && count < PUTS {
            put()?;
            count += 1;
        }
        Ok(())
    })?;
    let pace = start.elapsed() / count.max(1) as u32;
    // Whoever wants no lock waits for the processor alone.
    let table = bare(keys);
    let find = |keys: &[Key]| keys.iter().all(|key| is_in(&table, key));
    let unlocked = lookups(keys, find, || (0..count).try_for_each(|_| put()))?;
    drop(table);
    let (from, mut to) = (vec![7_u8; PUT], vec![0_u8; PUT]);
    let plain = lookups(keys, ask, || {
        for _ in 0..count {
            let start = Instant::now();
            std::hint::black_box(&mut to).copy_from_slice(std::hint::black_box(&from));
            std::thread::sleep(pace.saturating_sub(start.elapsed()));
        }
        Ok(())
    })?;
    for quantile in [0.999, 1.0] {
        let beyond = at(&ours, quantile) - at(&plain, quantile);
        let case = json!({"quantile": quantile});
        said.figure("wait_ms", case.clone(), beyond * 1e3)?;
        let beyond = at(&ours, quantile) - at(&unlocked, quantile);
        said.figure("wait_over_unlocked_ms", case, beyond * 1e3)?;
    }
    hold(json!({"op": "put"}), said, || puts.put(ns, count.min(HELD)))
}

/// `lock_hold_ms` of what `work` does.
pub(super) fn hold(
    case: Value,
    said: &mut Said<'_>,
    work: impl FnOnce() -> Result<(), Error>,
) -> Result<(), Error> {
    longest_hold(true);
    work()?;
    let longest = longest_hold(false);
    said.figure("lock_hold_ms", case, longest.as_secs_f64() * 1e3)
}

/// Seconds of each lookup that a thread makes while `work` goes on, in rising order.
fn lookups(
    keys: &[Key],
    ask: impl Fn(&[Key]) -> bool + Sync,
    work: impl FnOnce() -> Result<(), Error>,
) -> Result<Vec<f64>, Error> {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let looking = scope.spawn(|| {
            let mut seconds = Vec::new();
            for keys in keys.chunks(BATCH).cycle() {
                let start = Instant::now();
                let found = ask(keys);
                seconds.push(start.elapsed().as_secs_f64());
                std::hint::black_box(found);
                // One at least, however late this thread got a processor.
                if done.load(Ordering::Acquire) {
                    break;
                }
            }
            seconds.sort_unstable_by(f64::total_cmp);
            seconds
        });
        let worked = work();
        done.store(true, Ordering::Release);
        let seconds = looking.join();
        worked?;
        seconds.map_err(|_| Error::Bench("the lookup thread panicked".into()))
    })
}

fn at(sorted: &[f64], quantile: f64) -> f64 {
    let index = (sorted.len() as f64 * quantile) as usize;
    let index = index.min(sorted.len().saturating_sub(1));
    sorted.get(index).copied().unwrap_or(f64::NAN)
}
