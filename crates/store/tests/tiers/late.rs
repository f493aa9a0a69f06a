//! A tier in front of another one that answers late, and at random not at all.

use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use kvdepot_arena::parts::Part;
use kvdepot_arena::{Place, Refused, Reserved, Wanted};
use kvdepot_media::{Buffer, Checksum};
use kvdepot_store::option::{Kind as OptionKind, OptionSpec};
use kvdepot_store::{
    Directory, Ends, Error, Key, Kinds, NamespaceId, Outside, Page, Reply, Tier, TierKind,
    TierStats, ask,
};

/// How a tier behaves, as a test changes it.
#[derive(Default)]
pub struct Mood {
    /// Microseconds until an answer.
    pub delay: AtomicU64,
    /// The same of commits, in their place.
    pub commit_delay: AtomicU64,
    /// The same of discards.
    pub discard_delay: AtomicU64,
    pub commits: AtomicU64,
    /// Answers that are dropped, in a thousand.
    pub lost: AtomicU64,
    /// Nothing is answered before this is over.
    pub silent: AtomicBool,
    seed: AtomicU64,
    pub asked: AtomicU64,
    /// Blocks that somebody was about to read, or to write.
    pub reached: AtomicU64,
    /// Most blocks of a step, unless it is 0; read when the tier is opened, too.
    pub step: AtomicUsize,
    /// Most keys of a question that pinned or reserved.
    pub largest: AtomicUsize,
    /// Pins wait for a resource of this process until their limit, and find nothing.
    pub refuses: AtomicBool,
    /// The questions of pins that were refused so.
    pub refused: Mutex<Vec<Reply<Vec<Option<Place>>>>>,
}

impl Mood {
    fn loses(&self) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let seed = self
            .seed
            .fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
        let mixed = (seed ^ (seed >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 32;
        mixed % 1000 < self.lost.load(Ordering::Relaxed)
    }
}

/// Those kinds, with one more: `inner` behind a tier of that name which answers by `mood`.
pub fn kinds(name: &'static str, inner: TierKind, mood: &Arc<Mood>) -> Kinds {
    let mood = Arc::clone(mood);
    Kinds::new().with(TierKind {
        name,
        options: inner.options,
        check: |_, _| Ok(()),
        open: Arc::new(move |section, terms| {
            let tier = (inner.open)(section, terms)?;
            Ok(Late::new(name, tier, Arc::clone(&mood)) as Arc<dyn Tier>)
        }),
    })
}

/// The kind `Slow`: files that answer by `mood`, with the section `slow: {path: …}`.
pub fn slow_files(mood: &Arc<Mood>) -> Kinds {
    kinds("Slow", slow_kind(super::files::kind()), mood)
}

/// A kind of files under that name.
pub fn slow_kind(files: TierKind) -> TierKind {
    const OPTIONS: &[OptionSpec] = &[OptionSpec::new(
        "slow",
        "path",
        OptionKind::Text,
        "none",
        "",
    )];
    TierKind {
        name: "Slow",
        options: OPTIONS,
        ..files
    }
}

pub struct Late {
    name: &'static str,
    inner: Arc<dyn Tier>,
    mood: Arc<Mood>,
    clock: Arc<Clock>,
}

type Due = (std::cmp::Reverse<(Instant, u64)>, Job);

struct Job(Box<dyn FnOnce() + Send>);

#[derive(Default)]
struct Clock {
    state: Mutex<(BinaryHeap<Due>, u64, bool)>,
    changed: Condvar,
}

impl PartialEq for Job {
    fn eq(&self, _: &Job) -> bool {
        true
    }
}

impl Eq for Job {}

impl PartialOrd for Job {
    fn partial_cmp(&self, other: &Job) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Job {
    fn cmp(&self, _: &Job) -> std::cmp::Ordering {
        std::cmp::Ordering::Equal
    }
}

impl Clock {
    fn run(&self) {
        let mut state = self.state.lock().unwrap();
        loop {
            let now = Instant::now();
            match state.0.peek() {
                Some((std::cmp::Reverse((at, _)), _)) if *at <= now || state.2 => {
                    let (_, Job(job)) = state.0.pop().unwrap();
                    drop(state);
                    job();
                    state = self.state.lock().unwrap();
                }
                Some((std::cmp::Reverse((at, _)), _)) => {
                    let wait = *at - now;
                    state = self.changed.wait_timeout(state, wait).unwrap().0;
                }
                None if state.2 => return,
                None => state = self.changed.wait(state).unwrap(),
            }
        }
    }
}

impl Late {
    fn new(name: &'static str, inner: Arc<dyn Tier>, mood: Arc<Mood>) -> Arc<Late> {
        let clock = Arc::<Clock>::default();
        let runs = Arc::clone(&clock);
        std::thread::spawn(move || runs.run());
        Arc::new(Late {
            name,
            inner,
            mood,
            clock,
        })
    }

    /// Asks the other tier now, and answers later, or not.
    fn pass<T: Send + 'static>(
        &self,
        put: impl FnOnce(Reply<T>),
        reply: Reply<T>,
        lost: impl FnOnce(T) + Send + 'static,
    ) {
        let delay = self.mood.delay.load(Ordering::Relaxed);
        self.pass_after(delay, put, reply, lost);
    }

    fn pass_after<T: Send + 'static>(
        &self,
        delay: u64,
        put: impl FnOnce(Reply<T>),
        reply: Reply<T>,
        lost: impl FnOnce(T) + Send + 'static,
    ) {
        let (inner, pending) = ask();
        put(inner);
        let answer = pending.now().ok().flatten();
        let loses = self.mood.loses();
        let mood = Arc::clone(&self.mood);
        let job = move || {
            while mood.silent.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            match answer {
                Some(answer) if loses => lost(answer),
                Some(answer) => {
                    reply.answer(answer);
                }
                None => {}
            }
        };
        let delay = Duration::from_micros(delay);
        let mut state = self.clock.state.lock().unwrap();
        state.1 += 1;
        let at = std::cmp::Reverse((Instant::now() + delay, state.1));
        state.0.push((at, Job(Box::new(job))));
        self.clock.changed.notify_one();
    }
}

impl Tier for Late {
    fn name(&self) -> &'static str {
        self.name
    }

    fn lasts(&self) -> bool {
        self.inner.lasts()
    }

    fn block_max(&self) -> u64 {
        self.inner.block_max()
    }

    fn step_max(&self) -> usize {
        match self.mood.step.load(Ordering::Relaxed) {
            0 => self.inner.step_max(),
            step => step,
        }
    }

    fn probe(&self, namespace: NamespaceId, keys: &[Key], reply: Reply<Vec<bool>>) {
        self.pass(
            |inner| self.inner.probe(namespace, keys, inner),
            reply,
            drop,
        );
    }

    fn pin(
        &self,
        namespace: NamespaceId,
        keys: &[Key],
        used: &[u64],
        reply: Reply<Vec<Option<Place>>>,
    ) {
        self.mood.largest.fetch_max(keys.len(), Ordering::Relaxed);
        if self.mood.refuses.load(Ordering::Relaxed) {
            let count = keys.len();
            reply.waits(move || vec![None; count]);
            return self.mood.refused.lock().unwrap().push(reply);
        }
        let tier = Arc::clone(&self.inner);
        let unpin = move |places: Vec<Option<Place>>| {
            tier.unpin(&places.into_iter().flatten().collect::<Vec<_>>());
        };
        let pin = |inner| self.inner.pin(namespace, keys, used, inner);
        self.pass(pin, reply, unpin);
    }

    fn unpin(&self, places: &[Place]) {
        self.inner.unpin(places);
    }

    fn discard(&self, places: &[Place], reply: Reply<usize>) {
        let delay = self.mood.discard_delay.load(Ordering::Relaxed);
        self.pass_after(
            delay,
            |inner| self.inner.discard(places, inner),
            reply,
            drop,
        );
    }

    fn reserve(
        &self,
        namespace: NamespaceId,
        blocks: &[Wanted],
        reply: Reply<Vec<Result<Reserved, Refused>>>,
    ) {
        let asked = &self.mood.largest;
        asked.fetch_max(blocks.len(), Ordering::Relaxed);
        self.pass(
            |inner| self.inner.reserve(namespace, blocks, inner),
            reply,
            drop,
        );
    }

    /// What is committed and not heard of is stored all the same.
    fn commit(&self, written: Vec<(Reserved, Checksum)>, pinned: bool, reply: Reply<Vec<bool>>) {
        let count = written.len() as u64;
        self.mood.commits.fetch_add(count, Ordering::Relaxed);
        let places: Vec<Place> = written.iter().map(|(reserved, _)| **reserved).collect();
        let tier = Arc::clone(&self.inner);
        let unpin = move |stored: Vec<bool>| {
            let pins = places.into_iter().zip(stored);
            let pins = pins.filter(|(_, stored)| pinned && *stored);
            tier.unpin(&pins.map(|(place, _)| place).collect::<Vec<_>>());
        };
        let delay = match self.mood.commit_delay.load(Ordering::Relaxed) {
            0 => self.mood.delay.load(Ordering::Relaxed),
            own => own,
        };
        self.pass_after(
            delay,
            |inner| self.inner.commit(written, pinned, inner),
            reply,
            unpin,
        );
    }

    fn remove(&self, namespace: NamespaceId, keys: &[Key], reply: Reply<Vec<bool>>) {
        self.pass(
            |inner| self.inner.remove(namespace, keys, inner),
            reply,
            drop,
        );
    }

    fn clear(&self, namespace: NamespaceId, reply: Reply<usize>) {
        self.pass(|inner| self.inner.clear(namespace, inner), reply, drop);
    }

    fn list(&self, namespace: NamespaceId, from: u64, limit: usize, reply: Reply<Page>) {
        self.pass(
            |inner| self.inner.list(namespace, from, limit, inner),
            reply,
            drop,
        );
    }

    fn describe(&self, namespace: NamespaceId, description: &str) {
        self.inner.describe(namespace, description);
    }

    fn stats(&self) -> TierStats {
        self.inner.stats()
    }

    fn ends(&self) -> Arc<dyn Ends> {
        Arc::new(Counted(self.inner.ends(), Arc::clone(&self.mood)))
    }

    fn close(&self) {
        self.clock.state.lock().unwrap().2 = true;
        self.clock.changed.notify_one();
        // Answers that nobody waits for give back what they hold.
        let empty = || self.clock.state.lock().unwrap().0.is_empty();
        while !empty() {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.inner.close();
    }
}

/// Says how often somebody wants to know where a block's bytes are, or which file has them.
struct Counted(Arc<dyn Ends>, Arc<Mood>);

impl Ends for Counted {
    fn buffers(
        &self,
        place: &Place,
        offset: u64,
        len: u64,
        ends: &mut Vec<Buffer>,
    ) -> Result<(), Error> {
        self.1.reached.fetch_add(1, Ordering::Relaxed);
        self.0.buffers(place, offset, len, ends)
    }

    fn parts(&self, place: &Place) -> Result<Option<Vec<Part>>, Error> {
        self.0.parts(place)
    }

    fn write_parts(&self, place: &Place, found: &[Part]) -> Result<(), Error> {
        self.0.write_parts(place, found)
    }

    fn directory(&self) -> Option<Directory> {
        self.0.directory()
    }

    fn outside(&self, place: &Place) -> Option<Outside> {
        self.1.reached.fetch_add(1, Ordering::Relaxed);
        self.0.outside(place)
    }
}

/// A tier that cannot be opened.
pub fn broken() -> TierKind {
    TierKind {
        name: "Broken",
        options: &[],
        check: |_, _| Ok(()),
        open: Arc::new(|_, _| Err(Error::Closed("nothing is there"))),
    }
}
