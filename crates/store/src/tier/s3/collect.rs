//! Collection: the oldest objects go when what is in use comes near the capacity, by whichever of
//! those who share the bucket notices first. A listing says which those are, and what is really
//! there. *Age* is the time of writing or of the last use, as far as that is [known](super::uses):
//! an object store knows no time of use.

use std::collections::BinaryHeap;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::{Either, select};
use futures_util::stream::{self, StreamExt};
use kvdepot_arena::clock;
use kvdepot_arena::format::file_header::LEN;
use object_store::ObjectMeta;
use object_store::path::Path;
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};

use super::bucket::{Bucket, Fault, MANY};
use super::usage::{BEGIN, Collecting, Counted, END, MARKS, Usage, Used};
use super::uses::Merged;
use crate::tier::departures::Departures;
use crate::tier::posix::name::{BLOCKS, identity_of};

/// How often a process looks whether there is something to do, and how old a count may be.
const TICK: Duration = Duration::from_secs(60);
const COUNT_AGAIN: Duration = Duration::from_secs(3600);
const COUNT_IN_DOUBT: Duration = Duration::from_secs(300);
/// Of the time of large buckets, one in so many parts is spent on counts that are in doubt.
const IN_DOUBT_OVER_COUNT: u32 = 12;

/// How long one who finds another at it waits, at first and at most.
const PAUSE: Duration = Duration::from_millis(200);
const PAUSE_MOST: Duration = Duration::from_secs(2);

/// Most marks that a collection reads, and how many at a time: those of as many processes.
const MARKS_READ: usize = 256;
const MARKS_AT_ONCE: usize = 8;

/// How much of the capacity a collection makes room for that is announced, in thousandths.
const ANNOUNCED_MAX: u64 = 500;

/// How much of the capacity one look remembers of the oldest, in thousandths.
const REMEMBERED: u64 = 400;

/// The collector of one process.
pub(super) struct Collector {
    bucket: Arc<Bucket>,
    usage: Arc<Usage>,
    wake: Notify,
    needed: AtomicU64,
    /// A block was refused since the last round, as no space was spare.
    doubts: AtomicBool,
    rounds: watch::Sender<u64>,
    evicted: [AtomicU64; 2],
    departures: Arc<Departures>,
}

/// An object that may go; the newest is the greatest.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Old {
    used: i64,
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
            doubts: AtomicBool::new(false),
            rounds: watch::Sender::new(0),
            evicted: Default::default(),
            departures: Arc::clone(departures),
        })
    }

    /// Has the next round count, unless the last count is young.
    pub(super) fn doubt(&self) {
        self.doubts.store(true, Ordering::Relaxed);
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
        let mut looked: Option<Instant> = None;
        let mut woken = false;
        loop {
            if woken || looked.is_none_or(|at| clock::since(at) >= TICK) {
                looked = Some(clock::now());
                let needed = self.needed.swap(0, Ordering::Relaxed);
                match self.round(needed).await {
                    Ok(()) => self.usage.look_again(),
                    Err(fault) => {
                        if let Some(unsaid) = self.bucket.may_say("count", fault) {
                            tracing::warn!(
                                ?fault,
                                unsaid,
                                "cannot list the bucket; no blocks are evicted until a retry \
                                 succeeds"
                            );
                        }
                    }
                }
                self.rounds.send_modify(|rounds| *rounds += 1);
            }
            let mut marks_in = self.usage.marks_in();
            if marks_in.is_zero() {
                self.usage.mark().await;
                marks_in = TICK;
            }
            woken = timeout(TICK.min(marks_in), self.wake.notified())
                .await
                .is_ok();
        }
    }

    async fn round(&self, needed: u64) -> Result<(), Fault> {
        let mut pause = PAUSE;
        let is_in_doubt = self.doubts.swap(false, Ordering::Relaxed);
        loop {
            let used = self.usage.used().await?;
            if !self.is_needed(used, needed, is_in_doubt) {
                return Ok(());
            }
            if let Some(collecting) = self.usage.collect().await? {
                let ended = self.collect(&collecting, needed).await;
                self.usage.ended(&collecting).await;
                if ended? {
                    return Ok(());
                }
            }
            sleep(pause.mul_f64(self.bucket.chance())).await;
            pause = (pause * 2).min(PAUSE_MOST);
        }
    }

    /// Counts, and says what was found; false where another one does that.
    async fn collect(&self, by: &Collecting, needed: u64) -> Result<bool, Fault> {
        let found = match select(pin!(self.count(by, needed)), pin!(self.usage.renew(by))).await {
            Either::Left((found, _)) => found?,
            Either::Right((never, _)) => match never {},
        };
        match found {
            Some(found) => self.usage.found(by, found).await.map(|()| true),
            None => Ok(false),
        }
    }

    fn is_needed(&self, used: Used, needed: u64, is_in_doubt: bool) -> bool {
        let lacks = needed > 0 && used.bytes.saturating_add(needed) > self.usage.capacity();
        let longest = match is_in_doubt {
            true => COUNT_IN_DOUBT.max(used.took.saturating_mul(IN_DOUBT_OVER_COUNT)),
            false => COUNT_AGAIN,
        };
        let is_old = used.counted.is_none_or(|age| age >= longest);
        is_old || lacks || used.bytes >= self.usage.part(BEGIN)
    }

    /// Looks at all objects and removes the oldest, if there is too much with those that are
    /// announced; what is left. `None` where another one does that.
    async fn count(&self, by: &Collecting, needed: u64) -> Result<Option<Counted>, Fault> {
        let begun = clock::now();
        let mut sum = 0_u64;
        let mut oldest = Oldest {
            heap: BinaryHeap::new(),
            bytes: 0,
            enough: self.usage.part(REMEMBERED),
        };
        let mut uses = Merged::new(&self.usage.uses, by.time);
        let marks = self.marks(&mut uses).await?;
        let mut token = None;
        loop {
            let (page, next) = self.bucket.page(BLOCKS, token.as_deref(), MANY).await?;
            // What one page lists is counted sooner than another one's end is waited for.
            if by.is_over() || (by.has_no_lease() && next.is_some()) {
                return Ok(None);
            }
            for meta in page {
                sum = sum.saturating_add(meta.size);
                oldest.add(Old {
                    used: time_of(&uses, &meta.location, meta.last_modified.timestamp_micros()),
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
        let announced = by.left.min(self.usage.part(ANNOUNCED_MAX));
        let used = sum.saturating_add(announced);
        let full = used >= self.usage.part(BEGIN) || used.saturating_add(needed) > capacity;
        let most = self.usage.part(END).min(capacity.saturating_sub(needed));
        let end = match full {
            true => most.saturating_sub(announced),
            false => u64::MAX,
        };
        let mut gone = Vec::new();
        let (mut left, mut newest) = (sum, None);
        for old in oldest.heap.into_sorted_vec() {
            if left <= end {
                break;
            }
            // As it was listed: its prefix may have letters that would be escaped.
            let Ok(path) = Path::parse(old.path) else {
                continue;
            };
            // It may have been used since it was listed.
            if time_of(&uses, &path, old.used) > old.used {
                continue;
            }
            left -= old.bytes;
            newest = Some(old.used);
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
            "counted the objects of the bucket"
        );
        if let Some(newest) = newest {
            self.forget_marks(marks, newest).await;
        }
        let age = |used: i64| by.time.micros.saturating_sub(used).max(0) as u64 / 1_000_000;
        Ok(Some(Counted {
            bytes: sum - bytes,
            turnover: newest.map(age),
            took: clock::since(begun),
        }))
    }

    /// Reads what others say of their uses, the newest first; all objects that say so.
    async fn marks(&self, uses: &mut Merged<'_>) -> Result<Vec<ObjectMeta>, Fault> {
        let mut all = self.bucket.list_all(MARKS).await?;
        all.sort_unstable_by_key(|meta| std::cmp::Reverse(meta.last_modified));
        let others = all.iter().take(MARKS_READ);
        let others = others.filter(|meta| !self.usage.is_mine(&meta.location));
        let read = others.map(|meta| self.usage.read(&meta.location));
        let mut read = stream::iter(read.collect::<Vec<_>>()).buffered(MARKS_AT_ONCE);
        while let Some(read) = read.next().await {
            match read {
                Ok(Some((marks, _))) => uses.add(&marks),
                Ok(None) => {}
                Err(fault) => {
                    tracing::debug!(?fault, "cannot read the block uses of another process")
                }
            }
            if uses.is_full() {
                break;
            }
        }
        drop(read);
        Ok(all)
    }

    /// Removes marks that keep nothing any more, as nothing of that age is there, and those beyond
    /// what is read.
    async fn forget_marks(&self, marks: Vec<ObjectMeta>, newest: i64) {
        let marks = marks.into_iter().enumerate();
        let old = marks.filter(|(at, meta)| {
            let is_old = *at >= MARKS_READ || meta.last_modified.timestamp_micros() < newest;
            is_old && !self.usage.is_mine(&meta.location)
        });
        let old: Vec<_> = old.map(|(_, meta)| (meta.location, ())).collect();
        if !old.is_empty() {
            let _the_next_time = self.bucket.remove_all(old).await;
        }
    }
}

/// When an object was used last, in microseconds of the store's clock.
fn time_of(uses: &Merged<'_>, path: &Path, written: i64) -> i64 {
    let name = path.filename().and_then(identity_of);
    uses.time_of(name.as_ref(), written)
}
