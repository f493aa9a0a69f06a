//! A depot in a directory of its own, the twin beside it, and what is under way.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvdepot_service::Mover;
use kvdepot_store::sim::{Entered, Schedule, Turn};
use kvdepot_store::{
    Buffer, Class, Depot, Device, Group, Key, Namespace, NamespaceSpec, Pin, Reservation, Task,
};
use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::tally::Tally;
use kvdepot_testkit::sim::twin::{Id, Twin, Version};

use crate::common::raw::Raw;
use crate::history::Shape;

/// A law that was broken.
pub type Law<T = ()> = Result<T, String>;

/// In which other threads do what they do at once, also on a busy machine.
pub const SOON: Duration = Duration::from_secs(5);

/// Longer than any call takes, also on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(15);

/// Answers the law with what broke it.
macro_rules! law {
    ($holds:expr, $($text:tt)*) => {
        if !$holds {
            return Err(format!($($text)*));
        }
    };
}
pub(crate) use law;

/// Decides for the lanes.
pub struct Turns {
    rng: Mutex<Rng>,
    /// Slices that shall fail.
    pub fail: AtomicU64,
    /// Those that have.
    pub failed: AtomicU64,
}

/// A device's file.
#[derive(Clone)]
pub struct Medium {
    pub path: PathBuf,
    pub kib: u64,
    pub present: bool,
    /// What it holds, read by the numbers of the format.
    pub table: Option<Rc<Raw>>,
}

impl Medium {
    /// Once an owner has opened it.
    pub fn read(&mut self) {
        self.table = self.present.then(|| Rc::new(Raw::open(&self.path)));
    }

    /// Whether it is shorter than its arena.
    pub fn is_cut(&self) -> bool {
        self.path
            .metadata()
            .is_ok_and(|file| file.len() < self.kib << 10)
    }
}

/// What a task was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    Put,
    Get,
    Prefetch,
}

/// What a get has to answer for a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expect {
    Done,
    Miss,
    /// A miss whose buffer is not touched.
    Untouched,
    Length,
    Corrupt,
    Any,
}

/// A task under way.
pub struct Flying {
    pub task: Task,
    pub asked: Asked,
    pub ids: Vec<Id>,
    /// Numbers of the writers, for a put.
    pub writers: Vec<u64>,
    pub buffers: Vec<Vec<Buffer>>,
    pub expect: Vec<Expect>,
    pub settled: Vec<bool>,
    pub since: u64,
    /// Faults of lanes before it began.
    pub faults: u64,
    /// The copy that each key of a get has pinned, and its bytes.
    pub pinned: Vec<Option<(u64, u64)>>,
    /// Nothing else held room when a put began, so that it cannot be refused.
    pub has_room: bool,
    /// Nothing else waited for the far tier when a put began, so that it is not dropped.
    pub has_queue: bool,
    /// There was free room for all of a put when it began, so that none is declined.
    pub is_roomy: bool,
    /// Which blocks of a put were there, or on their way, when it began.
    pub there: Vec<bool>,
    /// The first of a put that had been stored or declined, and not asked for since.
    pub unread: Option<usize>,
}

impl Flying {
    /// A call since `since`, of which no answer is expected yet.
    pub fn new(task: Task, asked: Asked, ids: Vec<Id>, since: u64, faults: u64) -> Flying {
        Flying {
            settled: vec![false; ids.len()],
            pinned: vec![None; ids.len()],
            task,
            asked,
            ids,
            since,
            faults,
            writers: Vec::new(),
            buffers: Vec::new(),
            expect: Vec::new(),
            has_room: false,
            has_queue: false,
            is_roomy: false,
            there: Vec::new(),
            unread: None,
        }
    }
}

/// A reservation that some door holds.
pub struct Held {
    pub door: usize,
    pub id: Id,
    pub writer: u64,
    pub version: Version,
    pub reservation: Reservation,
}

/// A pin that some door holds.
pub struct HeldPin {
    pub door: usize,
    pub id: Id,
    pub since: u64,
    pub versions: Vec<Version>,
    pub pin: Pin,
    /// Tells it from the other pins.
    pub number: u64,
    /// Whether a mover has its placement now.
    pub loading: bool,
    /// Whether its block was unpublished by it.
    pub discarded: bool,
    /// Which copy of the block.
    pub birth: u64,
    /// The sequence of the far record, where it is pinned there.
    pub sequence: Option<u64>,
}

/// A group that some door holds.
pub struct HeldGroup {
    pub door: usize,
    pub ns: u8,
    /// In the order in which they were added.
    pub keys: Vec<u16>,
    pub class: Class,
    pub group: Group,
}

/// What the owner was asked since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub put_tasks: u64,
    pub put_blocks: u64,
    pub put_bytes: u64,
    pub get_tasks: u64,
    pub get_blocks: u64,
    pub get_bytes: u64,
    pub hits: u64,
    pub hit_bytes: u64,
    pub acknowledged: u64,
    pub full: u64,
    pub dropped: u64,
    pub missed: u64,
    pub corrupt: u64,
    /// Whether that is all that was found corrupt.
    pub sure: bool,
}

/// A far record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Far {
    pub stored: u64,
    pub parts: u16,
    pub sequence: u64,
    pub medium: usize,
    pub extents: Vec<(u64, u64)>,
}

/// What was there at the last look.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub near: BTreeSet<Id>,
    pub far: BTreeMap<Id, Far>,
    pub evicted: u64,
}

/// Why blocks may leave.
#[derive(Clone, Debug, Default)]
pub struct Cause {
    /// By these keys.
    pub removed: BTreeSet<Id>,
    /// For want of room.
    pub evicts: bool,
    /// Some device had room for all of a call.
    pub needless: bool,
    /// Blocks go from one device to another.
    pub moves: bool,
    /// Unpublished as one that does not verify, which a copy under way may find sound.
    pub discards: bool,
    /// Used or written by the call itself.
    pub own: BTreeSet<Id>,
}

pub struct World {
    pub shape: Shape,
    pub dir: tempfile::TempDir,
    pub schedule: Option<Arc<Schedule>>,
    entered: RefCell<Option<Entered>>,
    pub turns: Arc<Turns>,
    pub depot: RefCell<Option<Depot>>,
    pub clients: RefCell<Vec<Depot>>,
    pub mover: RefCell<Option<Mover>>,
    pub media: RefCell<Vec<Medium>>,
    pub twin: RefCell<Twin>,
    pub flying: RefCell<Vec<Flying>>,
    pub held: RefCell<Vec<Held>>,
    /// Reservations of this owner that were aborted lately, and by which door.
    pub ended: RefCell<Vec<(usize, Reservation)>>,
    pub pins: RefCell<Vec<HeldPin>>,
    pub groups: RefCell<Vec<HeldGroup>>,
    /// Bytes that were turned over, by the sequence of their record.
    pub rotten: RefCell<BTreeMap<u64, BTreeSet<u64>>>,
    pub seen: RefCell<Seen>,
    /// What each door was told of that a look has not missed yet.
    pub early: RefCell<BTreeMap<usize, BTreeSet<Id>>>,
    /// Blocks that left by their key.
    pub removed: RefCell<BTreeSet<Id>>,
    /// Blocks that were stored or declined since the owner was opened, and that nobody has asked
    /// for since: what may be declined, and what follows it in a call.
    pub unread: RefCell<BTreeSet<Id>>,
    pub cause: RefCell<Cause>,
    pub counts: RefCell<Counts>,
    pub rng: RefCell<Rng>,
    pub tally: RefCell<Tally>,
    pub nested: Cell<u32>,
    pub broken: RefCell<Option<String>>,
    pub numbers: Cell<u64>,
    /// Bytes that the file system was left with; `None` where there is room for everything.
    pub room: Cell<Option<u64>>,
    /// How often the owner was killed.
    pub copies: Cell<u32>,
    /// Memory of calls may be of it.
    pub device: Option<Arc<Device>>,
    seed: u64,
}

pub fn key(number: u16) -> Key {
    let mut key = [0; 32];
    key[..2].copy_from_slice(&number.to_le_bytes());
    // Keys that differ late differ too.
    key[30..].copy_from_slice(&number.to_le_bytes());
    Key(key)
}

pub fn number(key: &Key) -> u16 {
    u16::from_le_bytes([key.0[0], key.0[1]])
}

pub fn spec(ns: u8) -> NamespaceSpec {
    NamespaceSpec {
        model: format!("model {ns}"),
        dtype: "float32".into(),
        block_tokens: 16,
        ..NamespaceSpec::default()
    }
}

/// Bytes of a block in a tier's count: parts and their table begin at pages.
pub fn stored(parts: &[u64]) -> u64 {
    match parts {
        [one] => *one,
        many => {
            many.iter()
                .map(|len| len.next_multiple_of(4096))
                .sum::<u64>()
                + 32 * many.len() as u64
        }
    }
}

pub fn room(stored: u64) -> u64 {
    stored.next_multiple_of(4096)
}

impl World {
    /// Somebody asks for blocks, or removes them.
    pub fn asks(&self, ids: impl IntoIterator<Item = Id>) {
        let mut unread = self.unread.borrow_mut();
        ids.into_iter().for_each(|id| {
            unread.remove(&id);
        });
    }

    pub fn new(seed: u64, shape: &Shape, scheduled: bool) -> World {
        let turns = Arc::new(Turns::new(seed));
        let chooser = Arc::clone(&turns);
        let schedule = scheduled.then(|| Schedule::new(move |waiting| chooser.choose(waiting)));
        let dir = tempfile::Builder::new()
            .prefix("kvsim")
            .tempdir_in(crate::disk::dir())
            .unwrap();
        let first = shape.devices.min(2);
        let media = (0..shape.devices.max(first)).map(|device| Medium {
            path: dir.path().join(format!("arena{device}")),
            kib: shape.dax,
            present: device < first.max(1),
            table: None,
        });
        World {
            media: RefCell::new(media.collect()),
            shape: shape.clone(),
            schedule,
            entered: RefCell::default(),
            turns,
            depot: RefCell::default(),
            clients: RefCell::default(),
            mover: RefCell::default(),
            twin: RefCell::default(),
            flying: RefCell::default(),
            held: RefCell::default(),
            ended: RefCell::default(),
            pins: RefCell::default(),
            groups: RefCell::default(),
            rotten: RefCell::default(),
            seen: RefCell::default(),
            early: RefCell::default(),
            removed: RefCell::default(),
            unread: RefCell::default(),
            cause: RefCell::default(),
            counts: RefCell::default(),
            rng: RefCell::new(Rng::new(seed)),
            tally: RefCell::default(),
            nested: Cell::new(0),
            broken: RefCell::default(),
            numbers: Cell::new(seed << 20),
            room: Cell::new(None),
            copies: Cell::new(0),
            device: shape.cuda.then(|| crate::memory::device(scheduled)),
            dir,
            seed,
        }
    }

    /// Lanes and background are steps from now on; `meanwhile` happens while somebody waits.
    pub fn enter(&self, meanwhile: impl Fn() + 'static) {
        if let Some(schedule) = &self.schedule {
            *self.entered.borrow_mut() = Some(schedule.enter(meanwhile));
        }
    }

    pub fn leave(&self) {
        self.entered.borrow_mut().take();
    }

    pub fn is_scheduled(&self) -> bool {
        self.schedule.is_some()
    }

    /// The choices of a step depend on its number alone.
    pub fn reseed(&self, step: u64) {
        let mut rng = Rng::new(self.seed ^ step.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        self.turns.reseed(rng.fork());
        *self.rng.borrow_mut() = rng;
    }

    pub fn door(&self, name: &'static str) {
        self.tally.borrow_mut().door(name);
    }

    pub fn fault(&self, name: &'static str) {
        self.tally.borrow_mut().fault(name);
    }

    pub fn number(&self) -> u64 {
        self.numbers.set(self.numbers.get() + 1);
        self.numbers.get()
    }

    /// One tier, whose every count is known.
    pub fn is_single(&self) -> bool {
        !self.shape.pipeline.contains('|')
    }

    pub fn has_far(&self) -> bool {
        self.shape.pipeline.contains("Dax")
    }

    pub fn lasts(&self) -> bool {
        self.has_far()
    }

    /// Tells apart the copies of a block that there were: where a record has one, its sequence.
    pub fn birth(&self, id: Id) -> Option<u64> {
        let seen = self.seen.borrow();
        match seen.far.get(&id).filter(|_| !seen.near.contains(&id)) {
            Some(far) => Some(far.sequence),
            None => self.twin.borrow().live(id).map(|live| live.since),
        }
    }

    /// The mover, attached when it is needed first.
    pub fn with_mover<T>(&self, call: impl FnOnce(&Mover) -> T) -> Law<T> {
        let mover = self.mover.borrow_mut().take();
        let mover = match mover {
            Some(mover) => mover,
            None => {
                self.door("attach");
                let mover = Mover::attach(&self.socket(), Some(1), true);
                mover.map_err(|error| format!("attach: {error}"))?
            }
        };
        let answer = call(&mover);
        *self.mover.borrow_mut() = Some(mover);
        Ok(answer)
    }

    pub fn doors(&self) -> usize {
        1 + self.clients.borrow().len()
    }

    /// The depot behind a door: the owner, or a client.
    pub fn at(&self, door: usize) -> Depot {
        match door {
            0 => self.owner(),
            _ => self.clients.borrow()[door - 1].clone(),
        }
    }

    pub fn owner(&self) -> Depot {
        self.depot.borrow().clone().unwrap()
    }

    pub fn namespace(&self, door: usize, ns: u8) -> Law<Namespace> {
        let namespace = self.at(door).namespace(&spec(ns));
        namespace.map_err(|error| format!("namespace: {error}"))
    }

    /// Lanes take a turn; false when none has anything to do.
    pub fn lanes(&self) -> bool {
        self.schedule
            .as_ref()
            .is_some_and(|schedule| schedule.step())
    }

    /// Does all that can be done without anybody's help. Blocks that wait for a reservation to end
    /// are tried some times and stay.
    pub fn settle(&self) {
        let depot = self.owner();
        for _ in 0..60 {
            while self.lanes() {}
            if !depot.step_evictor()
                && !depot.step_background()
                && self.schedule.as_ref().is_none_or(|one| one.waiting() == 0)
            {
                break;
            }
        }
        while self.lanes() {}
    }

    /// Faults of lanes so far.
    pub fn faults(&self) -> u64 {
        self.turns.failed.load(Ordering::Relaxed)
    }
}

impl Turns {
    pub fn new(seed: u64) -> Turns {
        Turns {
            rng: Mutex::new(Rng::new(seed)),
            fail: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        }
    }

    pub fn reseed(&self, rng: Rng) {
        *self.rng.lock().unwrap() = rng;
    }

    pub fn choose(&self, waiting: usize) -> Turn {
        let mut rng = self.rng.lock().unwrap();
        let job = match rng.below(3) {
            // In order, mostly: else long queues never end the first batch.
            0 => 0,
            _ => rng.below(waiting as u64) as usize,
        };
        let fails = self.fail.load(Ordering::Relaxed) > 0 && rng.once_in(2);
        if fails {
            self.fail.fetch_sub(1, Ordering::Relaxed);
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
        Turn { job, fails }
    }
}

/// Waits for what other threads do soon.
pub fn eventually<T>(mut look: impl FnMut() -> Law<T>) -> Law<T> {
    let begun = Instant::now();
    loop {
        match look() {
            Err(_) if begun.elapsed() < SOON => std::thread::sleep(Duration::from_micros(200)),
            answer => return answer,
        }
    }
}
