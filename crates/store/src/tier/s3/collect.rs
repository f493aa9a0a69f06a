//! Collection: the oldest objects go when what is in use comes near the capacity, by whichever of
//! those who share the bucket notices first. A listing says which those are, and what is really
//! there. *Age* is the time of writing: an object store knows no time of use.

use std::collections::BinaryHeap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvdepot_arena::clock;
use kvdepot_arena::format::file_header::LEN;
use object_store::path::Path;
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};

use super::bucket::{Bucket, Fault, MANY};
use super::usage::{BEGIN, END, Usage, Used};
use crate::tier::departures::Departures;
use crate::tier::posix::name::{BLOCKS, identity_of};

/// How often a process looks whether there is something to do, and how old a count may be.
const TICK: Duration = Duration::from_secs(60);
const COUNT_AGAIN: Duration = Duration::from_secs(3600);

/// How long one who finds another at it waits.
const PAUSE: Duration = Duration::from_millis(200);

/// How much of the capacity a collection makes room for that is announced, in thousandths.
const ANNOUNCED_MAX: u64 = 200;

/// How much of the capacity one look remembers of the oldest, in thousandths.
const REMEMBERED: u64 = 400;

/// The collector of one process.
pub(super) struct Collector {
    bucket: Arc<Bucket>,
    usage: Arc<Usage>,
    wake: Notify,
    needed: AtomicU64,
    rounds: watch::Sender<u64>,
    evicted: [AtomicU64; 2],
    departures: Arc<Departures>,
}

/// An object that may go; the newest is the greatest.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Old {
    written: i64,
    path: String,
    bytes: u64,
}

/// The oldest objects, of so many bytes together.
struct Oldest {
    heap: BinaryHeap<Old>,
    bytes: u64,
    enough: u64,
}

impl Oldest {
    fn add(&mut self, old: Old) {
        self.bytes += old.bytes;
        self.heap.push(old);
        while let Some(newest) = self.heap.peek()
            && self.bytes - newest.bytes >= self.enough
        {
            self.bytes -= newest.bytes;
            self.heap.pop();
        }
    }
}

impl Collector {
    pub(super) fn new(
        bucket: &Arc<Bucket>,
        usage: &Arc<Usage>,
        departures: &Arc<Departures>,
    ) -> Arc<Collector> {
        Arc::new(Collector {
            bucket: Arc::clone(bucket),
            usage: Arc::clone(usage),
            wake: Notify::new(),
            needed: AtomicU64::new(0),
            rounds: watch::Sender::new(0),
            evicted: Default::default(),
            departures: Arc::clone(departures),
        })
    }

    /// Has a round begin soon.
    pub(super) fn wake(&self) {
        self.wake.notify_one();
    }

    /// Waits for the end of a round that makes room for so many bytes.
    pub(super) async fn make_room(&self, bytes: u64, patience: Duration) {
        self.needed.fetch_max(bytes, Ordering::Relaxed);
        let mut rounds = self.rounds.subscribe();
        rounds.mark_unchanged();
        self.wake();
        let _ended = timeout(patience, rounds.changed()).await;
    }

    /// Blocks and bytes that this process has evicted.
    pub(super) fn evicted(&self) -> (u64, u64) {
        let [blocks, bytes] = &self.evicted;
        (
            blocks.load(Ordering::Relaxed),
            bytes.load(Ordering::Relaxed),
        )
    }

    pub(super) async fn run(self: Arc<Collector>) {
        loop {
            let needed = self.needed.swap(0, Ordering::Relaxed);
            if let Err(fault) = self.round(needed).await
                && let Some(unsaid) = self.bucket.may_say("count", fault)
            {
                tracing::warn!(?fault, unsaid, "the bucket cannot be counted");
            }
            self.rounds.send_modify(|rounds| *rounds += 1);
            let _woken = timeout(TICK, self.wake.notified()).await;
        }
    }

    async fn round(&self, needed: u64) -> Result<(), Fault> {
        loop {
            let used = self.usage.used().await?;
            if !self.is_needed(used, needed) {
                return Ok(());
            }
            if let Some(collecting) = self.usage.collect().await? {
                let found = self.count(needed, collecting.left).await;
                let told = match found {
                    Ok(bytes) => self.usage.found(collecting, bytes).await,
                    Err(fault) => Err(fault),
                };
                self.usage.ended().await;
                return told;
            }
            sleep(PAUSE).await;
        }
    }

    fn is_needed(&self, used: Used, needed: u64) -> bool {
        let lacks = needed > 0 && used.bytes.saturating_add(needed) > self.usage.capacity();
        let is_old = used.counted.is_none_or(|age| age >= COUNT_AGAIN);
        is_old || lacks || used.bytes >= self.usage.part(BEGIN)
    }

    /// Looks at all objects and removes the oldest, if there is too much with those that are
    /// `announced`; what is left.
    async fn count(&self, needed: u64, announced: u64) -> Result<u64, Fault> {
        let begun = clock::now();
        let mut sum = 0_u64;
        let mut oldest = Oldest {
            heap: BinaryHeap::new(),
            bytes: 0,
            enough: self.usage.part(REMEMBERED),
        };
        let mut token = None;
        loop {
            let (page, next) = self.bucket.page(BLOCKS, token.as_deref(), MANY).await?;
            for meta in page {
                sum = sum.saturating_add(meta.size);
                oldest.add(Old {
                    written: meta.last_modified.timestamp_micros(),
                    path: meta.location.into(),
                    bytes: meta.size,
                });
            }
            let Some(next) = next else {
                break;
            };
            token = Some(next);
        }
        let capacity = self.usage.capacity();
        // Whatever is said, most of what is there stays.
        let announced = announced.min(self.usage.part(ANNOUNCED_MAX));
        let used = sum.saturating_add(announced);
        let full = used >= self.usage.part(BEGIN) || used.saturating_add(needed) > capacity;
        let most = self.usage.part(END).min(capacity.saturating_sub(needed));
        let end = match full {
            true => most.saturating_sub(announced),
            false => u64::MAX,
        };
        let mut gone = Vec::new();
        let mut left = sum;
        for old in oldest.heap.into_sorted_vec() {
            if left <= end {
                break;
            }
            // As it was listed: its prefix may have letters that would be escaped.
            let Ok(path) = Path::parse(old.path) else {
                continue;
            };
            left -= old.bytes;
            let name = path.filename().and_then(identity_of);
            gone.push((path, (name, old.bytes)));
        }
        let removed = self.bucket.remove_all(gone).await;
        let bytes: u64 = removed.iter().map(|(_, bytes)| bytes).sum();
        for (name, bytes) in &removed {
            if let Some(name) = name {
                self.departures.note(name, bytes.saturating_sub(LEN as u64));
            }
        }
        self.evicted[0].fetch_add(removed.len() as u64, Ordering::Relaxed);
        self.evicted[1].fetch_add(bytes, Ordering::Relaxed);
        tracing::debug!(
            bytes = sum,
            removed = bytes,
            took = ?clock::since(begun),
            "the bucket is counted"
        );
        Ok(sum - bytes)
    }
}
