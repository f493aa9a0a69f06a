//! How much of its capacity a bucket has, by objects of this fleet's own.
//!
//! Each process that writes has an object below `usage/` that says how many bytes it may have
//! written since it began (*announced*) and how many it surely has (*settled*). One more, `count`,
//! has what a listing found, and what each process had settled when the listing began. What is in
//! use is at most that count and what has been announced beyond it.
//!
//! Who wants to write announces first, looks at the others' announcements then, and takes its own
//! back where all together are too much: of two who announce at once at least one sees the other.
//! Announcements are a small part of the capacity, and written from without asking again. All of
//! it holds where the store shows what was written to whoever looks later, as S3 does.

mod lease;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::FutureExt;
use kvdepot_arena::clock;
use object_store::path::Path;
use object_store::{GetOptions, ObjectMeta, ObjectStore, PutMode, PutOptions};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::bucket::{Bucket, Fault, Way};
use super::uses::{StoreTime, Uses};
pub(super) use lease::{Collecting, Counted};

/// The folder, and in it the count and the one who collects.
pub(super) const FOLDER: &str = "usage";
const COUNT: &str = "count";
const LEASE: &str = "lease";

/// The folder of marks.
pub(super) const MARKS: &str = "marks";

/// What all processes together announce before they need it, of the capacity; and for how many at
/// least, as others may come.
const GRANTS_PART: u64 = 16;
const GRANTS_LEAST: u64 = 4;

/// Where a collection begins and ends, in thousandths of the capacity.
pub(super) const BEGIN: u64 = 940;
pub(super) const END: u64 = 900;

/// How long one who has said nothing is believed to live.
const SILENT: Duration = Duration::from_secs(300);

/// How long a look is believed that has found no room, unless some is made.
const FULL_AGAIN: Duration = Duration::from_secs(2);

/// How often marks of use are stored: so many times while all of the bucket is written once, as
/// far as that is known, within these bounds.
const MARKS_PART: u32 = 16;
const MARKS_LEAST: Duration = Duration::from_secs(5);
const MARKS_MOST: Duration = Duration::from_secs(900);
const MARKS_FIRST: Duration = Duration::from_secs(60);

/// How many times as long as it is waited for a write may be under way.
const UNDER_WAY: u32 = 30;

/// How often a process says that it is there.
const BEAT: Duration = Duration::from_secs(60);

/// What one process says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Said {
    announced: u64,
    settled: u64,
}

/// What a listing has found.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Count {
    bytes: u64,
    settled: HashMap<String, u64>,
    /// Seconds of its end, by the store's clock, and how many it took.
    at: i64,
    #[serde(default)]
    took: u64,
    /// Seconds since the last use of the newest block that went; `None` where none has gone yet.
    #[serde(default)]
    turnover: Option<u64>,
}

/// The count, as one process uses it.
pub(super) struct Usage {
    bucket: Arc<Bucket>,
    /// When this process has used blocks.
    pub(super) uses: Uses,
    me: String,
    capacity: u64,
    mine: Mutex<Mine>,
    /// One announcement at a time; what others have said, by the version of their objects.
    others: tokio::sync::Mutex<HashMap<String, (String, Said)>>,
}

#[derive(Default)]
struct Mine {
    said: Said,
    /// Of what was announced, what the others leave room for.
    granted: u64,
    /// Written or to be written, and surely written.
    taken: u64,
    settled: u64,
    /// Of what was taken, what may have been written, since when that is so.
    doubts: VecDeque<(std::time::Instant, u64)>,
    said_at: Option<std::time::Instant>,
    /// What is in use, when that was looked at last.
    seen: u64,
    /// When a look has found no room.
    full: Option<std::time::Instant>,
    /// What was seen last of the store's clock, and of what the bucket turns over.
    time: Option<StoreTime>,
    turnover: Option<u64>,
    marked_at: Option<std::time::Instant>,
}

/// What is in use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Used {
    pub(super) bytes: u64,
    /// How old the count is; `None` where nobody has counted.
    pub(super) counted: Option<Duration>,
    /// How long it took.
    pub(super) took: Duration,
}

/// Room for one object. Dropped, it is given back.
pub(super) struct Promise(Option<(Arc<Usage>, u64)>);

impl Promise {
    /// Where nobody counts.
    pub(super) fn nothing() -> Promise {
        Promise(None)
    }

    /// It was written.
    pub(super) fn settle(mut self) {
        if let Some((usage, bytes)) = self.0.take() {
            usage.mine.lock().settled += bytes;
        }
    }

    /// It may have been written. The next count says so, once it cannot be on its way any more.
    pub(super) fn keep(mut self) {
        if let Some((usage, bytes)) = self.0.take() {
            usage.mine.lock().doubts.push_back((clock::now(), bytes));
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        if let Some((usage, bytes)) = self.0.take() {
            let mut mine = usage.mine.lock();
            mine.taken = mine.taken.saturating_sub(bytes);
        }
    }
}

/// All that is said of the usage, at one moment.
struct Look {
    count: Option<Count>,
    all: Vec<(String, Said, ObjectMeta)>,
    lease: Option<ObjectMeta>,
    /// The store's time: of this process's own object, or else of the newest.
    now: i64,
}

impl Look {
    /// How old an object is. The store's clock may have been set back since.
    fn age_of(&self, meta: &ObjectMeta) -> Duration {
        Duration::from_secs(self.now.abs_diff(meta.last_modified.timestamp()))
    }
}

impl Usage {
    pub(super) fn new(bucket: &Arc<Bucket>, capacity: u64) -> Arc<Usage> {
        let seed = format!("{:?} {:?}", clock::now(), std::time::SystemTime::now());
        let random = xxhash_rust::xxh3::xxh3_64(seed.as_bytes());
        let host = rustix::system::uname();
        let host = host.nodename().to_string_lossy();
        let plain = |letter: char| match letter.is_ascii_alphanumeric() {
            true => letter,
            false => '-',
        };
        let host: String = host.chars().take(64).map(plain).collect();
        Arc::new(Usage {
            bucket: Arc::clone(bucket),
            uses: Uses::new(),
            me: format!("{host}-{}-{random:016x}", std::process::id()),
            capacity,
            mine: Mutex::default(),
            others: tokio::sync::Mutex::default(),
        })
    }

    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    pub(super) fn seen(&self) -> u64 {
        self.mine.lock().seen
    }

    /// So many thousandths of the capacity.
    pub(super) fn part(&self, thousandths: u64) -> u64 {
        (u128::from(self.capacity) * u128::from(thousandths) / 1000) as u64
    }

    /// Takes so many bytes, and announces those of a call that are `beyond` them with these; `None`
    /// where there are not so many, or nobody has counted yet.
    pub(super) async fn take(
        self: &Arc<Usage>,
        bytes: u64,
        beyond: u64,
    ) -> Result<Option<Promise>, Fault> {
        if let Some(promise) = self.take_granted(bytes) {
            return Ok(Some(promise));
        }
        let mut others = self.others.lock().await;
        if let Some(promise) = self.take_granted(bytes) {
            return Ok(Some(promise));
        }
        // Who collects says when it is worth another look.
        let full = self.mine.lock().full;
        if full.is_some_and(|at| clock::since(at) < FULL_AGAIN) {
            return Ok(None);
        }
        // A whole grant, or what is needed now.
        let ahead = self.grant(others.len() as u64 + 1).max(beyond);
        for more in [bytes.saturating_add(ahead), bytes] {
            let (granted, announced) = {
                let mine = self.mine.lock();
                let announced = mine.taken.saturating_add(more);
                (mine.granted, announced.max(mine.granted))
            };
            self.say(announced).await?;
            let look = self.look(&mut others).await?;
            let used = self.used_of(&look);
            if used.counted.is_some() && used.bytes <= self.capacity {
                self.mine.lock().granted = announced;
                if let Some(promise) = self.take_granted(bytes) {
                    return Ok(Some(promise));
                }
                continue;
            }
            self.say(granted).await?;
            let seen = used.bytes.saturating_sub(announced - granted);
            let mut mine = self.mine.lock();
            mine.seen = seen;
            // With less in advance it would be the same.
            if used.counted.is_none() || seen.saturating_add(bytes) > self.capacity {
                break;
            }
        }
        self.mine.lock().full = Some(clock::now());
        Ok(None)
    }

    /// There may be room again.
    pub(super) fn look_again(&self) {
        self.mine.lock().full = None;
    }

    /// What one of so many processes announces in advance.
    fn grant(&self, processes: u64) -> u64 {
        self.capacity / GRANTS_PART / processes.max(GRANTS_LEAST)
    }

    /// The same of what was announced before.
    pub(super) fn take_granted(self: &Arc<Usage>, bytes: u64) -> Option<Promise> {
        let mut mine = self.mine.lock();
        let taken = mine.taken.checked_add(bytes)?;
        // The others forget whoever is silent.
        let is_known = mine.said_at.is_some_and(|at| clock::since(at) < SILENT / 2);
        if taken > mine.granted || !is_known {
            return None;
        }
        mine.taken = taken;
        Some(Promise(Some((Arc::clone(self), bytes))))
    }

    /// What is in use now. A process says at times that it is there.
    pub(super) async fn used(&self) -> Result<Used, Fault> {
        let mut others = self.others.lock().await;
        let is_late = |at: std::time::Instant| clock::since(at) >= BEAT;
        let announced = {
            let mine = self.mine.lock();
            let beats = mine.said_at.is_none_or(is_late) || mine.said.announced != mine.granted;
            (beats || self.is_behind(&mine)).then_some(mine.granted)
        };
        if let Some(announced) = announced {
            self.say(announced).await?;
        }
        let look = self.look(&mut others).await?;
        Ok(self.used_of(&look))
    }

    /// Whether it is worth saying what is settled: what a process that is killed has not said is
    /// in use twice for the others, as it is found, too.
    pub(super) fn is_unsaid(&self) -> bool {
        self.is_behind(&self.mine.lock())
    }

    fn is_behind(&self, mine: &Mine) -> bool {
        let doubts: u64 = mine.doubts.iter().map(|(_, bytes)| bytes).sum();
        let is_idle = mine.taken == mine.settled + doubts;
        is_idle && mine.settled.saturating_sub(mine.said.settled) >= self.grant(GRANTS_LEAST)
    }

    fn used_of(&self, look: &Look) -> Used {
        let count = look.count.clone().unwrap_or_default();
        let beyond = look.all.iter().map(|(name, said, _)| {
            let settled = count.settled.get(name).copied().unwrap_or(0);
            said.announced.saturating_sub(settled)
        });
        let bytes = beyond.fold(count.bytes, u64::saturating_add);
        self.mine.lock().seen = bytes;
        let age = Duration::from_secs(look.now.abs_diff(count.at));
        Used {
            bytes,
            counted: look.count.is_some().then_some(age),
            took: Duration::from_secs(count.took),
        }
    }

    /// Says what this process may have written.
    async fn say(&self, announced: u64) -> Result<(), Fault> {
        let said = Said {
            announced,
            settled: self.settled(),
        };
        // Not later than the store's time of it.
        let now = clock::now();
        self.put(&self.me, &said, PutMode::Overwrite).await?;
        let mut mine = self.mine.lock();
        (mine.said, mine.said_at) = (said, Some(now));
        Ok(())
    }

    /// What is written, or will not be any more: a listing that begins now has all of it.
    fn settled(&self) -> u64 {
        let over = self.bucket.timeout() * UNDER_WAY;
        let mut mine = self.mine.lock();
        while let Some((since, bytes)) = mine.doubts.front().copied()
            && clock::since(since) >= over
        {
            mine.doubts.pop_front();
            mine.settled += bytes;
        }
        mine.settled
    }

    /// How long it is until marks are to be stored, where there are uses that they do not have.
    pub(super) fn marks_in(&self) -> Duration {
        let mine = self.mine.lock();
        let interval = match mine.turnover {
            Some(seconds) => Duration::from_secs(seconds) / MARKS_PART,
            None => MARKS_FIRST,
        };
        let interval = interval.clamp(MARKS_LEAST, MARKS_MOST);
        let since = mine.marked_at.map_or(interval, clock::since);
        interval.saturating_sub(since)
    }

    /// Stores marks of the uses since the last ones.
    pub(super) async fn mark(&self) {
        let time = self.mine.lock().time;
        let Some(time) = time.filter(|_| self.uses.is_unsaid()) else {
            return;
        };
        let marks = self.uses.marks(time);
        self.mine.lock().marked_at = Some(clock::now());
        let path = self.bucket.path(MARKS).join(&*self.me);
        if let Err(fault) = self.store(&path, marks, PutMode::Overwrite).await {
            tracing::debug!(?fault, "cannot publish block uses to other processes");
            self.uses.are_unsaid();
        }
    }

    /// Whether an object has this process's marks.
    pub(super) fn is_mine(&self, path: &Path) -> bool {
        path.filename() == Some(&self.me)
    }

    /// Nothing is written any more: what was announced beyond that is taken back.
    pub(super) async fn close(&self) {
        let _others = self.others.lock().await;
        let (taken, is_said) = {
            let mine = self.mine.lock();
            (mine.taken, mine.said_at.is_some())
        };
        if is_said {
            let _a_count_finds_it = self.say(taken).await;
        }
        self.mark().await;
    }

    fn path(&self, name: &str) -> Path {
        self.bucket.path(FOLDER).join(name)
    }

    async fn put(
        &self,
        name: &str,
        what: &impl Serialize,
        mode: PutMode,
    ) -> Result<Option<String>, Fault> {
        let text = serde_json::to_vec(what).unwrap_or_default();
        self.store(&self.path(name), text, mode).await
    }

    /// Stores an object; its ETag.
    async fn store(
        &self,
        path: &Path,
        bytes: Vec<u8>,
        mode: PutMode,
    ) -> Result<Option<String>, Fault> {
        let (bytes, options) = (Bytes::from(bytes), PutOptions::from(mode));
        let put = || {
            let store = self.bucket.store();
            store
                .put_opts(path, bytes.clone().into(), options.clone())
                .boxed()
        };
        self.bucket.ask(Way::Write, put).await.map(|put| put.e_tag)
    }

    async fn remove(&self, path: &Path) -> Result<(), Fault> {
        let bucket = &self.bucket;
        bucket.remove(path).await
    }

    /// An object and its ETag.
    pub(super) async fn read(&self, path: &Path) -> Result<Option<(Bytes, Option<String>)>, Fault> {
        let get = || {
            let got = async {
                let store = self.bucket.store();
                let got = store.get_opts(path, GetOptions::new()).await?;
                let e_tag = got.meta.e_tag.clone();
                Ok((got.bytes().await?, e_tag))
            };
            got.boxed()
        };
        self.bucket.ask_for(Way::Write, get).await
    }

    async fn get<T: for<'a> Deserialize<'a>>(&self, path: &Path) -> Result<Option<T>, Fault> {
        let read = self.read(path).await?;
        Ok(read.and_then(|(bytes, _)| serde_json::from_slice(&bytes).ok()))
    }

    /// Reads what has changed.
    async fn look(&self, others: &mut HashMap<String, (String, Said)>) -> Result<Look, Fault> {
        let listed = self.bucket.list_all(FOLDER).await?;
        let mut look = Look {
            count: None,
            all: Vec::new(),
            lease: None,
            now: 0,
        };
        let mut known = HashMap::new();
        let mut now = None;
        for meta in listed {
            let Some(name) = meta.location.filename().map(str::to_owned) else {
                continue;
            };
            look.now = look.now.max(meta.last_modified.timestamp());
            match &*name {
                // Not those of the list: it is as new as what is said beside it.
                COUNT => look.count = self.get(&meta.location).await?,
                LEASE => look.lease = Some(meta),
                _ if name == self.me => {
                    now = Some(meta.last_modified.timestamp());
                    let mut mine = self.mine.lock();
                    let micros = meta.last_modified.timestamp_micros();
                    mine.time = mine.said_at.map(|at| StoreTime { micros, at });
                    let said = mine.said;
                    drop(mine);
                    look.all.push((name, said, meta));
                }
                _ => {
                    // Lists of some stores have none, and times are of seconds.
                    let version = meta.e_tag.clone().unwrap_or_default();
                    let is_it = |of: &str| *of == version && !of.is_empty();
                    let said = match others.remove(&name).filter(|(of, _)| is_it(of)) {
                        Some((_, said)) => Some(said),
                        None => self.get(&meta.location).await?,
                    };
                    // What cannot be read may be anything.
                    let said = said.unwrap_or_else(|| Said {
                        announced: self.grant(GRANTS_LEAST),
                        settled: 0,
                    });
                    known.insert(name.clone(), (version, said));
                    look.all.push((name, said, meta));
                }
            }
        }
        self.mine.lock().turnover = look.count.as_ref().and_then(|count| count.turnover);
        *others = known;
        look.now = now.unwrap_or(look.now);
        Ok(look)
    }
}
