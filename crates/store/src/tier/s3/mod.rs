//! The tier `S3`: one object a block in a bucket of any object store, which any number of processes
//! and hosts share.
//!
//! Guarantees: a block is there whole or not at all, as an object is; it is acknowledged when the
//! store has answered that it has it; what is read is of the one version that was looked at, and
//! anything else is a miss; every wait for the store has an end.
//!
//! `bucket` asks the store, `object` is what is read, `staging` what is written and `send` how,
//! `held` what is pinned or reserved, `usage` counts for all, `uses` knows when blocks were used
//! and `collect` makes room.

mod bucket;
mod collect;
mod credentials;
mod described;
mod held;
mod object;
mod options;
mod remove;
mod send;
mod staging;
mod usage;
mod uses;
mod voice;
mod write;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use kvdepot_arena::format::file_header::LEN;
use kvdepot_arena::{
    Departed, Error, Identity, Key, NamespaceId, Place, Refused, Reserved, TierStats, Wanted,
    clock, parts, size,
};
use kvdepot_host::cpu;
use kvdepot_host::fork::Origin;
use kvdepot_media::{Checksum, PART_LEN_MAX};
use object_store::path::Path;
use parking_lot::Mutex;
use tokio::runtime::{Builder, Handle, Runtime};

use super::contract::{Ends, NamespacePage, Page, Terms, Tier};
use super::departures::Departures;
use super::description::encode;
use super::eviction_limit::EvictionLimit;
use super::filter::{Filter, unknown};
use super::identities;
use super::kinds::TierKind;
use super::late::{Progress, Reply};
use super::posix::name::{path_of, spread};
use bucket::{Bucket, Fault, Way, is_wanted, serving};
use collect::Collector;
use described::Descriptions;
use held::{Held, Pinned};
use object::{Found, Object, Seen, look, read};
use options::{OPTIONS, Options};
use staging::Staging;
use usage::Usage;

/// The tier's name.
const NAME: &str = "S3";

/// Threads that sign and send requests and copy what comes.
const THREADS: usize = 4;

/// Folders that the objects are spread over.
const FOLDERS: u32 = 256;

/// Of these, those that are listed at a time.
const LISTED: u32 = 32;

/// How long a close waits for the store.
const TO_CLOSE: Duration = Duration::from_millis(900);

/// The kind `S3`, with its section.
#[must_use]
pub(super) fn kind() -> TierKind {
    TierKind {
        name: NAME,
        options: OPTIONS,
        check: |section, _| Options::read(section).map(drop),
        open: Arc::new(|section, terms| {
            let tier = S3::new(&Options::read(section)?, terms)?;
            Ok(Arc::new(tier) as Arc<dyn Tier>)
        }),
    }
}

/// The tier.
struct S3 {
    common: Arc<Common>,
    runtime: Mutex<Option<Runtime>>,
    origin: Origin,
}

/// What its threads use.
struct Common {
    bucket: Arc<Bucket>,
    runtime: Handle,
    staging: Arc<Staging>,
    /// `None` where the bucket has rules.
    fleet: Option<(Arc<Usage>, Arc<Collector>)>,
    held: Arc<Held>,
    filter: Arc<Filter<Found>>,
    departures: Arc<Departures>,
    /// The bucket and the prefix, for people.
    place: String,
    block_max: u64,
    limit: EvictionLimit,
    stored: [AtomicU64; 2],
    full: AtomicU64,
    descriptions: Descriptions,
}

impl S3 {
    fn new(options: &Options, terms: Terms) -> Result<S3, Error> {
        let bucket = Arc::new(Bucket::open(options, terms.timeout)?);
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("kvdepot-s3")
            .on_thread_start(|| {
                // Pinned ones still work; there is nobody to tell.
                let _free = cpu::reset_affinity();
            })
            .enable_all()
            .build();
        let runtime = runtime.map_err(|source| Error::Io {
            path: "cannot start a thread".into(),
            source,
        })?;
        let departures = Arc::<Departures>::default();
        let fleet = options.capacity.map(|capacity| {
            let usage = Usage::new(&bucket, capacity);
            let collector = Collector::new(&bucket, &usage, &departures);
            let _detached = runtime.spawn(Arc::clone(&collector).run());
            (usage, collector)
        });
        let common = Arc::new(Common {
            bucket,
            runtime: runtime.handle().clone(),
            staging: Staging::new(options.staging),
            fleet,
            held: Held::new(terms.number, terms.keys),
            filter: Arc::default(),
            departures,
            place: format!("s3://{}/{}", options.bucket, options.prefix),
            block_max: options.block_max().min(PART_LEN_MAX),
            limit: EvictionLimit::new(terms.is_last, |len| LEN as u64 + len),
            stored: Default::default(),
            full: AtomicU64::new(0),
            descriptions: Descriptions::default(),
        });
        Ok(S3 {
            common,
            runtime: Mutex::new(Some(runtime)),
            origin: Origin::here()?,
        })
    }

    /// Runs `work`, which answers a question, in the background.
    fn serve<T: Send + 'static, F: Future<Output = ()> + Send + 'static>(
        &self,
        reply: Reply<T>,
        work: impl FnOnce(Reply<T>) -> F,
    ) {
        let question = reply.progress();
        let _detached = self.common.runtime.spawn(serving(question, work(reply)));
    }

    /// Does `work` for each item, some at a time, as long as somebody waits for what comes of it,
    /// and answers with that.
    fn answer<I, T, F>(
        &self,
        items: Vec<I>,
        question: Progress,
        work: impl Fn(Arc<Common>, I) -> F + Send + 'static,
        done: impl FnOnce(Vec<T>) + Send + 'static,
    ) where
        I: Send + 'static,
        T: Send + 'static,
        F: Future<Output = T> + Send + 'static,
    {
        let common = Arc::clone(&self.common);
        let _detached = self.common.runtime.spawn(async move {
            let (at_once, count) = (common.bucket.at_once(), items.len());
            let runtime = common.runtime.clone();
            let wanted = question.clone();
            let begin = move |item| {
                runtime.spawn(serving(question.clone(), work(Arc::clone(&common), item)))
            };
            let items = items.into_iter().take_while(|_| wanted.is_wanted());
            let each = stream::iter(items).map(begin).buffered(at_once);
            let all: Result<Vec<T>, _> = each.try_collect().await;
            if let Some(answers) = all.ok().filter(|all| all.len() == count) {
                done(answers);
            }
        });
    }

    /// The same for a lookup, whose parts count by themselves.
    fn look_up<T, R, F>(
        &self,
        names: Vec<Identity>,
        reply: Reply<R>,
        work: impl Fn(Arc<Common>, Identity) -> F + Send + 'static,
        told: impl FnOnce(Vec<Option<T>>) -> R + Clone + Send + 'static,
    ) where
        T: Send + 'static,
        R: Send + 'static,
        F: Future<Output = T> + Send + 'static,
    {
        let parts = reply.in_parts(names.len(), told.clone());
        let (question, noted) = (reply.progress(), parts.clone());
        let each = names.into_iter().enumerate().collect();
        let look = move |common, (at, name)| {
            let (found, noted) = (work(common, name), noted.clone());
            async move { noted.note(at, found.await) }
        };
        self.answer(each, question, look, move |_: Vec<()>| {
            reply.answer_parts(|| told(parts.take()));
        });
    }
}

/// Answers how many are gone, unless one is not known to be.
fn count_of(reply: Reply<usize>) -> impl FnOnce(Vec<Result<bool, Fault>>) + Send {
    |gone| {
        if gone.iter().all(Result::is_ok) {
            let gone = gone.into_iter().flatten();
            reply.answer(gone.filter(|gone| *gone).count());
        }
    }
}

impl Tier for S3 {
    fn name(&self) -> &'static str {
        NAME
    }

    fn lasts(&self) -> bool {
        true
    }

    fn block_max(&self) -> u64 {
        self.common.block_max
    }

    fn probe(&self, namespace: NamespaceId, keys: &[Key], reply: Reply<Vec<bool>>) {
        let names = identities(namespace, keys);
        let (known, _) = self.common.filter.of(names.iter().copied());
        let (asked, told) = unknown(names, known);
        if asked.is_empty() {
            reply.asks_nobody();
            reply.answer(told(Vec::new()));
            return;
        }
        let has = |common: Arc<Common>, name| async move {
            matches!(common.find(&name, Way::Read).await, Ok(Seen::Block(_)))
        };
        self.look_up(asked, reply, has, told);
    }

    fn pin(
        &self,
        namespace: NamespaceId,
        keys: &[Key],
        used: &[u64],
        reply: Reply<Vec<Option<Place>>>,
    ) {
        let names = identities(namespace, keys);
        let pin = |common: Arc<Common>, name| async move { common.pin(name).await };
        let common = Arc::clone(&self.common);
        let is_use = !used.is_empty();
        self.look_up(
            names,
            reply,
            pin,
            move |found: Vec<Option<Option<Pinned>>>| {
                let pins = found.into_iter().map(Option::flatten);
                let pins: Vec<_> = pins.map(|pin| pin.map(Pinned::hand_out)).collect();
                if is_use {
                    common.note_uses(pins.iter().flatten().map(|place| place.identity));
                }
                pins
            },
        );
    }

    fn note_used(&self, namespace: NamespaceId, used: &[(Key, u64)]) {
        let named = used.iter().map(|(key, _)| Identity {
            namespace,
            key: *key,
        });
        self.common.note_uses(named);
    }

    fn unpin(&self, places: &[Place]) {
        self.common.held.unpin(places);
    }

    fn discard(&self, places: &[Place], reply: Reply<usize>) {
        let objects = places.iter().filter_map(|place| {
            let object = self.common.held.object_of(place).ok()?;
            self.common.bucket.count(Fault::Strange);
            Some(object)
        });
        let discard =
            |common: Arc<Common>, object: Arc<Object>| async move { common.discard(&object).await };
        let question = reply.progress();
        self.answer(objects.collect(), question, discard, count_of(reply));
    }

    fn reserve(
        &self,
        namespace: NamespaceId,
        blocks: &[Wanted],
        reply: Reply<Vec<Result<Reserved, Refused>>>,
    ) {
        let (common, blocks) = (Arc::clone(&self.common), blocks.to_vec());
        self.serve(reply, async move |reply| {
            let made = common.reserve(namespace, blocks).await;
            reply.answer(made);
        });
    }

    fn commit(&self, written: Vec<(Reserved, Checksum)>, pinned: bool, reply: Reply<Vec<bool>>) {
        self.common.held.publishes(&written);
        let names: Vec<_> = written.iter().map(|(one, _)| one.identity).collect();
        let noting = Arc::clone(&self.common);
        let publish = move |common: Arc<Common>, (reserved, checksum)| async move {
            common.publish(reserved, checksum, pinned).await
        };
        let question = reply.progress();
        self.answer(
            written,
            question,
            publish,
            move |stored: Vec<Option<Option<Pinned>>>| {
                let there = names
                    .iter()
                    .zip(&stored)
                    .filter(|(_, stored)| stored.is_some());
                noting.note_uses(there.map(|(name, _)| *name));
                let told = stored.into_iter().map(|stored| {
                    let pin = stored.as_ref().map(|_| ());
                    let _pinned = stored.flatten().map(Pinned::hand_out);
                    pin.is_some()
                });
                reply.answer(told.collect());
            },
        );
    }

    fn remove(&self, namespace: NamespaceId, keys: &[Key], reply: Reply<Vec<bool>>) {
        self.common.held.forget_copies(namespace, Some(keys));
        let names = identities(namespace, keys);
        let remove = |common: Arc<Common>, name| async move { common.remove(&name, None).await };
        let question = reply.progress();
        self.answer(names, question, remove, |gone: Vec<Result<bool, Fault>>| {
            if let Ok(gone) = gone.into_iter().collect::<Result<_, _>>() {
                reply.answer(gone);
            }
        });
    }

    fn clear(&self, namespace: NamespaceId, reply: Reply<usize>) {
        self.common.held.forget_copies(namespace, None);
        let common = Arc::clone(&self.common);
        self.serve(reply, async move |reply| {
            if let Ok(count) = common.clear(namespace).await {
                reply.answer(count);
            }
        });
    }

    /// A mark is the number of a folder.
    fn describe(&self, namespace: NamespaceId, description: &str) {
        let (common, text) = (Arc::clone(&self.common), encode(description));
        let _detached = self.common.runtime.spawn(async move {
            common.describe(namespace, &text).await;
        });
    }

    /// A mark is the number of a folder.
    fn list(&self, namespace: NamespaceId, from: u64, limit: usize, reply: Reply<Page>) {
        let common = Arc::clone(&self.common);
        self.serve(reply, async move |reply| {
            let (mut page, mut next) = (Vec::new(), from);
            while next < FOLDERS.into() && page.len() < limit && is_wanted() {
                let some = next as u32..FOLDERS.min(next as u32 + LISTED);
                next = some.end.into();
                let Ok(names) = common.names(some, namespace).await else {
                    return;
                };
                let blocks = names.into_iter().map(|(name, _, len)| (name.key, len));
                page.extend(blocks);
            }
            reply.answer((page, (next < FOLDERS.into()).then_some(next)));
        });
    }

    fn namespaces(&self, from: u64, reply: Reply<NamespacePage>) {
        let common = Arc::clone(&self.common);
        self.serve(reply, async move |reply| {
            match common.shares(from as u32).await {
                Ok(page) => {
                    reply.answer(page);
                }
                Err(fault) => tracing::debug!(?fault, "cannot list the bucket"),
            }
        });
    }

    fn departed(&self, listener: u64, limit: usize) -> Departed {
        self.common.departures.since(listener, limit)
    }

    fn forget_listener(&self, listener: u64) {
        self.common.departures.forget(listener);
    }

    fn about(&self) -> String {
        let place = &self.common.place;
        match &self.common.fleet {
            Some((usage, _)) => format!("{NAME} {} at {place}", size::show(usage.capacity())),
            None => format!("{NAME} at {place}"),
        }
    }

    fn stats(&self) -> TierStats {
        let common = &self.common;
        let mut stats = TierStats::new(NAME);
        stats.uncounted = true;
        if let Some((usage, collector)) = &common.fleet {
            let (used, capacity) = (usage.seen(), usage.capacity());
            stats.capacity_bytes = capacity;
            stats.live_bytes = used;
            stats.free_bytes = capacity.saturating_sub(used);
            stats.largest_free_bytes = stats.free_bytes;
            (stats.evicted_blocks, stats.evicted_bytes) = collector.evicted();
        }
        (stats.pinned_blocks, stats.reserved_blocks) = common.held.counts();
        stats.full = common.full.load(Ordering::Relaxed);
        stats.stored_blocks = common.stored[0].load(Ordering::Relaxed);
        stats.stored_bytes = common.stored[1].load(Ordering::Relaxed);
        (stats.requests, stats.retries, stats.request_errors) = common.bucket.counts();
        stats.corrupt_blocks = common.bucket.counted(Fault::Strange);
        stats
    }

    fn ends(&self) -> Arc<dyn Ends> {
        Arc::clone(&self.common.held) as _
    }

    fn close(&self) {
        let Some(runtime) = self.runtime.lock().take() else {
            return;
        };
        if !self.origin.is_here() {
            return leave(runtime);
        }
        self.common.held.close();
        let deadline = clock::now() + TO_CLOSE;
        let (common, (done, closed)) = (Arc::clone(&self.common), mpsc::channel::<()>());
        let close = move || {
            if let Some((usage, _)) = &common.fleet {
                let said = async { tokio::time::timeout(TO_CLOSE / 2, usage.close()).await };
                let _or_not = runtime.block_on(said);
            }
            runtime.shutdown_timeout(deadline.saturating_duration_since(clock::now()));
            drop(done);
        };
        // The caller may be one of the threads that end.
        let thread = std::thread::Builder::new().name("kvdepot-close".into());
        if thread.spawn(close).is_ok() {
            let _closed = closed.recv_timeout(TO_CLOSE);
        }
    }
}

impl Drop for S3 {
    fn drop(&mut self) {
        match self.runtime.lock().take() {
            Some(runtime) if self.origin.is_here() => runtime.shutdown_background(),
            Some(runtime) => leave(runtime),
            None => {}
        }
    }
}

/// In a forked child there is no thread of it that could end.
fn leave(runtime: Runtime) {
    let _left = std::mem::ManuallyDrop::new(runtime);
}

impl Common {
    /// Notes a use of blocks in prefix order.
    fn note_uses(&self, names: impl DoubleEndedIterator<Item = Identity>) {
        if let Some((usage, _)) = &self.fleet {
            usage.uses.note(names);
        }
    }

    fn path_of(&self, name: &Identity) -> Path {
        self.bucket.path(&path_of(name, spread(name) % FOLDERS))
    }

    /// What is known to be at a block's name.
    fn known(&self, name: &Identity) -> Option<Seen> {
        let (known, _) = self.filter.of(std::iter::once(*name));
        let found = known.into_iter().next().flatten();
        found.map(|found| found.map_or(Seen::Nothing, Seen::Block))
    }

    /// What is at a block's name, which the store is asked for unless it is known.
    async fn find(&self, name: &Identity, way: Way) -> Result<Seen, Fault> {
        match self.known(name) {
            Some(seen) => Ok(seen),
            None => self.look(name, way).await,
        }
    }

    /// The same of the store itself, which others write to and remove from.
    async fn look(&self, name: &Identity, way: Way) -> Result<Seen, Fault> {
        let (_, turn) = self.filter.of(std::iter::empty());
        let path = self.path_of(name);
        let seen = look(&self.bucket, way, &path, (name, self.held.has_keys())).await?;
        let found = match &seen {
            Seen::Block(found) => Some(found.clone()),
            Seen::Nothing | Seen::Strange { .. } => None,
        };
        self.filter.note_answers([(*name, found)].into_iter(), turn);
        Ok(seen)
    }

    async fn pin(&self, name: Identity) -> Option<Pinned> {
        if !self.held.proves(name.namespace) {
            return None;
        }
        let (_, turn) = self.filter.of(std::iter::empty());
        let found = match self.find(&name, Way::Read).await.ok()? {
            Seen::Block(found) => found,
            Seen::Nothing => return None,
            Seen::Strange { e_tag, newer } => {
                self.bucket.count(Fault::Strange);
                if let Some(unsaid) = self.bucket.may_say("object", Fault::Strange) {
                    let key = &name.key;
                    tracing::warn!(%key, unsaid,
                        "the content of an object does not match the object's key; the block is a \
                         miss");
                }
                // The next put writes it again, unless it is one of a later release.
                if !newer {
                    let _gone = self.remove_strange(&name, &e_tag).await;
                }
                return None;
            }
        };
        let path = self.path_of(&name);
        let table = match usize::from(found.note.parts) {
            1 => Vec::new(),
            parts => {
                let bytes = parts as u64 * parts::ENTRY;
                let begin = (LEN as u64 + found.note.len).checked_sub(bytes)?;
                let mut table = Vec::with_capacity(bytes as usize);
                let whole = (&path, &*found.e_tag);
                let take = |_, bytes: &[u8]| {
                    table.extend_from_slice(bytes);
                    true
                };
                let taken = read(&self.bucket, Way::Read, whole, begin, bytes, take).await;
                if taken.is_err() {
                    self.filter.note_answers([(name, None)].into_iter(), turn);
                    return None;
                }
                table
            }
        };
        let object = self.object(name, (path, found), table);
        self.held.pin(name, object)
    }

    fn object(&self, name: Identity, (path, found): (Path, Found), table: Vec<u8>) -> Object {
        Object {
            bucket: Arc::clone(&self.bucket),
            runtime: self.runtime.clone(),
            filter: Arc::clone(&self.filter),
            name,
            path,
            found,
            table,
        }
    }
}
