//! The contract, for what this crate has.

use super::*;
use crate::buffer::Owner;
use crate::carrier::{Alignment, Receipt};
use crate::copier::Ticket;
use crate::file::{File, Hands};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Mutex;

/// A file of a directory for tests.
struct OnDisk {
    file: Arc<File>,
    plain: Arc<std::fs::File>,
    alignment: usize,
    end: Mutex<usize>,
    _directory: tempfile::TempDir,
}

impl OnDisk {
    fn new(flags: i32, hands: &Arc<Hands>) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let mut options = std::fs::OpenOptions::new();
        options.read(true).write(true).create(true);
        let plain = options.open(&path).unwrap();
        // Not every file system has direct I/O.
        let file = options.custom_flags(flags).open(&path).ok()?;
        let file = File::new(file, hands).unwrap();
        Some(Self {
            alignment: Carrier::alignment(&*file).at as usize,
            file,
            plain: Arc::new(plain),
            end: Mutex::new(0),
            _directory: directory,
        })
    }
}

impl Medium for OnDisk {
    fn name(&self) -> String {
        format!("a file of alignment {}", self.alignment)
    }

    fn alignment(&self) -> usize {
        self.alignment
    }

    fn room(&self, len: usize) -> Room {
        let mut end = self.end.lock().unwrap();
        let begin = *end;
        *end = (begin + len).next_multiple_of(4096);
        self.plain.set_len(*end as u64).unwrap();
        let (look, fill) = (Arc::clone(&self.plain), Arc::clone(&self.plain));
        Room {
            buffer: self.file.buffer(begin, len),
            look: Box::new(move || {
                let mut bytes = vec![0; len];
                look.read_exact_at(&mut bytes, begin as u64).unwrap();
                bytes
            }),
            fill: Box::new(move |bytes| fill.write_all_at(bytes, begin as u64).unwrap()),
        }
    }
}

const SECTORS: Alignment = Alignment {
    at: 512,
    memory: Some(512),
};

/// As a device's memory: all goes through the slab.
const APART: Alignment = Alignment {
    at: 1,
    memory: None,
};

#[test]
#[cfg_attr(miri, ignore = "Miri knows no memory files, which a slab is made of")]
fn carriers_that_answer_at_once_late_and_in_no_order_keep_the_contract() {
    let (at_once, sectors) = (Store::new(Alignment::NONE), Store::new(SECTORS));
    let (late, apart) = (Late::new(SECTORS, 1), Late::new(APART, 2));
    every_pair(&[&InMemory, &at_once, &sectors, &late, &apart]);
}

#[test]
#[cfg_attr(miri, ignore = "as above")]
fn files_keep_the_contract() {
    // A ring, where the system has one for this process.
    let (best, threads) = (Hands::new(2).unwrap(), Hands::threads(2).unwrap());
    let (buffered, late) = (
        OnDisk::new(0, &best).unwrap(),
        Late::new(Alignment::NONE, 3),
    );
    let direct = [&best, &threads].map(|hands| OnDisk::new(libc::O_DIRECT, hands));
    let mut media: Vec<&dyn Medium> = vec![&InMemory, &late, &buffered];
    let direct = direct.iter().flatten();
    media.extend(direct.map(|direct| direct as &dyn Medium));
    every_pair(&media);
}

/// One part of 8192 bytes between memory and a file of the system.
fn through(file: std::fs::File, writes: bool) -> Result<Outcome, Failure> {
    let copier = copier(1, 0, 64 << 10, 1);
    let file = File::new(file, &Hands::new(1).unwrap()).unwrap();
    let (memory, there) = (Buffer::from_vec(vec![5; 8192]), file.buffer(0, 8192));
    let mut batch = copier.batch();
    let (from, to) = if writes {
        (memory, there)
    } else {
        (there, memory)
    };
    batch.part(&id(0), &[from], &[to], None, 0).unwrap();
    run(&copier, batch)[0]
}

#[test]
#[cfg_attr(miri, ignore = "as above")]
fn a_file_that_fails_says_why() {
    let open = |path: &str| std::fs::File::options().read(true).write(true).open(path);
    let full = through(open("/dev/full").unwrap(), true);
    assert_eq!(
        full,
        Err(Failure::Os {
            errno: libc::ENOSPC
        })
    );
    // Nothing is mapped at the first pages of this process.
    let bad = through(std::fs::File::open("/proc/self/mem").unwrap(), false);
    assert_eq!(bad, Err(Failure::Os { errno: libc::EIO }));
    let directory = std::fs::File::open("/").unwrap();
    assert_eq!(
        through(directory, false),
        Err(Failure::Os {
            errno: libc::EISDIR
        })
    );
    let short = tempfile::tempfile().unwrap();
    short.write_all_at(&[5; 5000], 0).unwrap();
    let failure = Failure::Short {
        carried: 5000,
        asked: 8192,
    };
    assert_eq!(through(short, false), Err(failure));
}

#[test]
#[cfg_attr(miri, ignore = "as above")]
fn what_cannot_be_written_as_it_is_is_refused() {
    let copier = copier(1, 0, 64 << 10, 1);
    let store = Store::new(SECTORS);
    let room = Medium::room(&store, 8192).buffer;
    let memory = |len| [Buffer::from_vec(vec![0; len])];
    let mut batch = copier.batch();
    let at = |offset, len| room.slice(offset, len).unwrap();
    for (len, to) in [(512, vec![at(1, 512)]), (511, vec![at(0, 511)])] {
        let refused = batch.part(&id(0), &memory(len), &to, None, 0);
        assert!(matches!(refused, Err(crate::Error::Unaligned { .. })));
    }
    let first_padded = [at(0, 511).padded(), at(1024, 512)];
    assert!(
        batch
            .part(&id(0), &memory(1023), &first_padded, None, 0)
            .is_err()
    );
    let fixed = [at(0, 512).read_only()];
    assert!(batch.part(&id(0), &memory(512), &fixed, None, 0).is_err());
    assert!(batch.is_empty());
    // Bytes that are carried from where they go would be hashed as one thing and be another.
    let over = batch.part(&id(0), &[at(0, 1024)], &[at(512, 1024)], None, 0);
    assert!(matches!(over, Err(crate::Error::Overlap { .. })));
    let options = std::fs::OpenOptions::new()
        .append(true)
        .open("/dev/null")
        .unwrap();
    assert!(File::new(options, &Hands::new(1).unwrap()).is_err());
    assert!(Hands::new(0).is_err() && Hands::new(257).is_err());
}

#[cfg(feature = "sim")]
mod simulated {
    use super::*;
    use crate::sim::{Schedule, Turn};

    /// What a schedule chose among, and what became of the parts.
    type History = (Vec<(usize, usize)>, Parts);

    /// Parts between memory and a file, by a schedule that a seed gives, which fails some turns.
    fn history(seed: u64) -> History {
        let chosen = Arc::new(Mutex::new(Vec::new()));
        let (log, mut state) = (Arc::clone(&chosen), seed);
        let schedule = Schedule::new(move |waiting| {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(99);
            let (job, fails) = ((state >> 33) as usize % waiting, state >> 60 == 0);
            log.lock().unwrap().push((waiting, job));
            Turn { job, fails }
        });
        let _entered = schedule.enter(|| ());
        let (disk, copier) = (
            OnDisk::new(0, &Hands::new(2).unwrap()).unwrap(),
            copier(2, 0, 128 << 10, 2),
        );
        let mut batch = copier.batch();
        let shape = |number: usize| match number % 3 {
            0 => Shaped::new(&disk, &InMemory, number, 70_000),
            1 => Shaped::new(&InMemory, &disk, number, 40_000),
            _ => Shaped::new(&disk, &disk, number, 9000),
        };
        let parts: Vec<Shaped> = (0..12).map(shape).collect();
        for (number, part) in parts.iter().enumerate() {
            part.add(&mut batch, number, part.sum);
        }
        let outcomes = run(&copier, batch);
        for (part, outcome) in parts.iter().zip(&outcomes) {
            assert!(outcome.is_err() || part.has_arrived());
        }
        assert_eq!(copier.free_regions(), 2);
        let chosen = chosen.lock().unwrap().clone();
        (chosen, outcomes)
    }

    #[test]
    #[cfg_attr(miri, ignore = "as above")]
    fn a_seed_is_an_order_of_carries_too() {
        let histories: Vec<History> = (0..20).map(history).collect();
        for (seed, one) in (0..).zip(&histories) {
            assert_eq!(*one, history(seed), "seed {seed}");
        }
        let parts = || histories.iter().flat_map(|(_, parts)| parts);
        assert!(parts().any(Result::is_ok) && parts().any(Result::is_err));
        let most = histories
            .iter()
            .flat_map(|(chosen, _)| chosen)
            .map(|(waiting, _)| waiting);
        assert!(most.max() > Some(&4), "carries wait side by side");
    }
}

/// A batch of one part that a carrier has when this returns, through a region.
fn kept(copier: &Copier, keeping: &Arc<Keeping>) -> Ticket {
    let carrier = Arc::clone(keeping) as Arc<dyn Carrier>;
    let mut batch = copier.batch();
    let there = Buffer::carried(carrier, 1, 5000, true);
    let memory = Buffer::from_vec(vec![0; 5000]);
    batch.part(&id(1), &[there], &[memory], None, 0).unwrap();
    let ticket = copier.submit(batch, |_| {});
    assert!(keeping.waits_for_one(PATIENCE));
    ticket
}

fn staged(copier: &Copier, owner: Arc<()>) -> Ticket {
    let memory = Buffer::from_vec(content(1, 5000));
    let keeps: Owner = Arc::new((memory.clone(), owner));
    // SAFETY: the owner has the buffer that the memory is of.
    let from = unsafe { Buffer::from_raw(memory.addr(), memory.len(), false, keeps) };
    let mut batch = copier.batch();
    batch.stage().unwrap();
    let to = Buffer::from_vec(vec![0; 5000]);
    batch.part(&id(1), &[from], &[to], None, 0).unwrap();
    copier.submit(batch, |_| {})
}

#[test]
#[cfg_attr(miri, ignore = "Miri knows no memory files, which a slab is made of")]
fn a_carrier_that_does_not_answer_leaves_regions_to_others() {
    let copier = copier(1, 0, 256 << 10, 4);
    let keeping = Keeping::new(512);
    let stuck: Vec<Ticket> = (0..6).map(|_| kept(&copier, &keeping)).collect();
    let other = Keeping::new(512);
    // The one that is left serves whoever comes.
    for _ in 0..2 {
        assert!(staged(&copier, Arc::default()).wait(Some(PATIENCE)));
    }
    let beside = kept(&copier, &other);
    stuck.iter().chain([&beside]).for_each(Ticket::cancel);
    while stuck
        .iter()
        .chain([&beside])
        .any(|ticket| !ticket.is_done())
    {
        keeping.give_up_cancelled();
        other.give_up_cancelled();
        std::thread::yield_now();
    }
    assert_eq!(copier.free_regions(), 4);
}

#[test]
#[cfg_attr(miri, ignore = "Miri knows no memory files, which a slab is made of")]
fn what_waits_for_a_region_and_is_cancelled_lets_its_buffers_go() {
    let copier = copier(1, 0, 64 << 10, 1);
    let keeping = Keeping::new(512);
    let stuck = kept(&copier, &keeping);
    let owner = Arc::new(());
    let watch = Arc::downgrade(&owner);
    let waiting = staged(&copier, owner);
    assert!(!waiting.wait(Some(Duration::from_millis(20))));
    waiting.cancel();
    assert!(
        waiting.wait(Some(PATIENCE)),
        "it has no region, and needs none"
    );
    assert_eq!(watch.strong_count(), 0);
    // Nobody waits for carriers any more.
    assert_eq!(keeping.give_up_cancelled(), 0);
    copier.give_up();
    assert_eq!(keeping.give_up_cancelled(), 1);
    assert!(stuck.wait(Some(PATIENCE)));
}

/// Bytes of each part of a large call: a slice each.
const PIECE: usize = 128 << 10;

/// Starts a batch of `count` reads of a carrier, from offset `at` on, for a call if it names one.
fn reads(
    (copier, keeping): (&Copier, &Arc<Keeping>),
    (at, count, len): (usize, usize, usize),
    call: Option<usize>,
    ended: &mpsc::Sender<usize>,
) {
    let mut batch = copier.batch();
    call.iter().for_each(|call| batch.of_call(*call));
    for number in 0..count {
        let carrier = Arc::clone(keeping) as Arc<dyn Carrier>;
        let there = Buffer::carried(carrier, at + 2 * number * PIECE, len, true);
        let memory = Buffer::from_vec(vec![0; len]);
        batch.part(&id(1), &[there], &[memory], None, 0).unwrap();
    }
    let ended = ended.clone();
    let _ticket = copier.submit(batch, move |_| ended.send(count).unwrap());
}

/// Has the lane copy some memory, for a call if it names one, and then runs `then` there or here.
fn copies(copier: &Copier, call: Option<usize>, then: impl FnOnce() + Send + 'static) -> Ticket {
    const LEN: usize = 2 * INLINE as usize;
    let mut batch = copier.batch();
    call.iter().for_each(|call| batch.of_call(*call));
    let (from, to) = (vec![1; LEN], vec![0; LEN]);
    let (from, to) = (Buffer::from_vec(from), Buffer::from_vec(to));
    batch.part(&id(2), &[from], &[to], None, 0).unwrap();
    copier.submit(batch, |_| then())
}

/// Keeps the only lane in a completion, until what this returns is dropped.
fn stop_the_lane(copier: &Copier) -> mpsc::Sender<()> {
    loop {
        let (go, gone) = mpsc::channel();
        let (stands, standing) = mpsc::channel();
        let _ticket = copies(copier, None, move || {
            let thread = std::thread::current();
            let is_lane = thread.name().is_some_and(|name| name.contains("lane-0"));
            stands.send(is_lane).unwrap();
            if is_lane {
                let _over = gone.recv();
            }
        });
        if standing.recv().unwrap() {
            return go;
        }
    }
}

/// What the thread that submits it begins by itself.
const INLINE: u64 = 4096;

/// A copier of one lane and four regions.
fn one_lane() -> Copier {
    let config = CopierConfig {
        lanes: 1,
        inline_max: INLINE,
        slice_size: PIECE as u64,
        staging_slab: Some(8 * PIECE as u64),
        staging_regions: Some(4),
        ..CopierConfig::default()
    };
    Copier::new(config).unwrap()
}

/// Says of a receipt that all is carried; whether it was of a small read.
fn carried(receipt: Receipt) -> bool {
    let len = receipt.len();
    receipt.carried(len);
    len < PIECE
}

#[test]
#[cfg_attr(miri, ignore = "Miri knows no memory files, which a slab is made of")]
fn a_small_read_waits_for_its_turn_at_regions_and_not_for_the_end_of_a_large_call() {
    const COUNT: usize = 64;
    for batches in [1, COUNT] {
        let (copier, keeping) = (one_lane(), Keeping::new(512));
        let (sender, ended) = mpsc::channel();
        let each = COUNT / batches;
        for number in 0..batches {
            // At no multiple of what the carrier takes, so that they go through regions.
            let at = 1 + number * each * 2 * PIECE;
            reads((&copier, &keeping), (at, each, PIECE), Some(7), &sender);
        }
        // All of them have a region, or wait for one.
        assert!(copies(&copier, Some(7), || {}).wait(Some(PATIENCE)));
        reads((&copier, &keeping), (1, 1, 100), None, &sender);
        let order = (0..=COUNT).map(|_| carried(keeping.take(PATIENCE)));
        let order: Vec<bool> = order.collect();
        // Those that have the regions, and turns of the large call at a region and at the lane.
        let before = order.iter().position(|is_small| *is_small).unwrap();
        assert!(before <= 6, "{before} of {COUNT} came first");
        let parts: usize = (0..=batches).map(|_| ended.recv().unwrap()).sum();
        assert_eq!(parts, COUNT + 1);
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri knows no memory files, which a slab is made of")]
fn a_small_read_that_has_come_is_hashed_in_its_turn_and_not_after_a_large_call() {
    const COUNT: usize = 64;
    let (copier, keeping) = (one_lane(), Keeping::new(1));
    let (sender, ended) = mpsc::channel();
    reads((&copier, &keeping), (0, COUNT, PIECE), None, &sender);
    reads((&copier, &keeping), (0, 1, 100), None, &sender);
    let receipts: Vec<Receipt> = (0..=COUNT).map(|_| keeping.take(PATIENCE)).collect();
    let stopped = stop_the_lane(&copier);
    let (small, large): (Vec<_>, Vec<_>) = receipts
        .into_iter()
        .partition(|receipt| receipt.len() < PIECE);
    large.into_iter().chain(small).for_each(|one| {
        carried(one);
    });
    drop(stopped);
    assert_eq!([ended.recv(), ended.recv()], [Ok(1), Ok(COUNT)]);
}
