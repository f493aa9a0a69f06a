//! Against the double of 3FS's library in `crates/testkit/usrbio`, which is compiled here.

use super::*;
use crate::buffer::Buffer;
use crate::checksum::{self, PartId};
use crate::conformance::{InMemory, Medium, Room, double, every_pair};
use crate::copier::{Copier, CopierConfig};
use crate::file::{File, Hands};
use crate::tried::PAUSE;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

/// Nothing here takes as long, unless it does not answer.
const LONG: Duration = Duration::from_secs(60);

/// The double and a folder that is its 3FS. One at a time: it counts for the process.
struct Mounted {
    library: PathBuf,
    folder: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Mounted {
    fn new() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        static BUILT: OnceLock<PathBuf> = OnceLock::new();
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let build = || kvdepot_testkit::double::build("usrbio");
        let mounted = Self {
            library: BUILT.get_or_init(build).clone(),
            folder: tempfile::tempdir().unwrap(),
            _turn: turn,
        };
        let path = std::ffi::CString::new(mounted.folder.path().to_str().unwrap()).unwrap();
        // One that failed has left them as they were.
        for knob in [
            "hang",
            "refuse",
            "short",
            "short_all",
            "lose",
            "lose_all",
            "fail",
            "fail_with",
            "full",
            "delay",
            "reorder",
            "answer",
        ] {
            mounted.say(&format!("double_{knob}"), 0);
        }
        mounted.say("double_mount", path.as_ptr().expose_provenance() as i64);
        mounted
    }

    fn say(&self, function: &str, argument: i64) -> i64 {
        double(&self.library, function, argument)
    }

    fn ask(&self, function: &str) -> i64 {
        self.say(function, 0)
    }

    fn config(&self, patience: Duration) -> UsrbioConfig {
        UsrbioConfig {
            library: self.library.clone(),
            path: self.folder.path().to_owned(),
            streams: 2,
            running: 32,
            waiting: 1024,
            patience,
        }
    }

    fn hands(&self, patience: Duration) -> Arc<Hands> {
        open(&self.config(patience))
    }

    /// What has gone with its owners, a little later.
    fn is_left(&self) {
        let end = Instant::now() + LONG;
        let counts = ["double_registered", "double_rings", "double_iovs"];
        while counts.iter().any(|count| self.ask(count) > 0) || self.links() > 0 {
            let left = counts.map(|count| self.ask(count));
            assert!(Instant::now() < end, "{left:?}, {} links", self.links());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(self.ask("double_misused"), 0);
    }

    fn links(&self) -> usize {
        let links = self.folder.path().join("3fs-virt/iovs");
        std::fs::read_dir(links).unwrap().count()
    }
}

/// Begins hands, again where the machine stood still for longer than they wait.
fn open(config: &UsrbioConfig) -> Arc<Hands> {
    let end = Instant::now() + LONG;
    let mut tries = std::iter::repeat_with(|| Hands::usrbio(config));
    let begun = tries.find(|hands| hands.is_ok() || Instant::now() > end);
    begun.unwrap().unwrap()
}

/// A file there, with room for whatever is asked for.
struct There {
    file: Arc<File>,
    plain: Arc<std::fs::File>,
    end: Mutex<usize>,
}

impl There {
    fn new(mounted: &Mounted, hands: &Arc<Hands>) -> Self {
        let path = mounted.folder.path();
        let mut options = std::fs::File::options();
        let options = options.read(true).write(true);
        let named = tempfile::NamedTempFile::new_in(path).unwrap();
        let (_, path) = named.keep().unwrap();
        Self {
            file: File::new(options.open(&path).unwrap(), hands).unwrap(),
            plain: Arc::new(options.open(&path).unwrap()),
            end: Mutex::new(0),
        }
    }
}

impl Medium for There {
    fn name(&self) -> String {
        "a file of a 3FS".to_owned()
    }

    fn room(&self, len: usize) -> Room {
        let mut end = self.end.lock().unwrap();
        let begin = *end;
        *end = begin + len;
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

#[test]
fn files_of_a_3fs_keep_the_contract_in_both_directions() {
    let mounted = Mounted::new();
    for reorder in [0, 1] {
        mounted.say("double_reorder", reorder);
        let hands = mounted.hands(LONG);
        let (one, other) = (There::new(&mounted, &hands), There::new(&mounted, &hands));
        every_pair(&[&InMemory, &one, &other]);
        drop((one, other, hands));
        mounted.is_left();
    }
    mounted.say("double_reorder", 0);
}

fn copier(slab: u64, regions: usize) -> Copier {
    let config = CopierConfig {
        lanes: 2,
        inline_max: 0,
        staging_slab: Some(slab),
        staging_regions: Some(regions),
        ..CopierConfig::default()
    };
    Copier::new(config).unwrap()
}

fn content(number: usize, len: usize) -> Vec<u8> {
    let byte = |at: usize| (number * 131 + at * 7 + at / 251) as u8;
    (0..len).map(byte).collect()
}

type Ran = (Vec<Answer>, Vec<Buffer>);

/// Parts between memory and a file, each of so many bytes: what became of them, and the memory.
fn run(copier: &Copier, there: &There, op: Op, lens: &[usize]) -> Ran {
    let mut batch = copier.batch();
    let mut memory = Vec::new();
    for (number, len) in lens.iter().enumerate() {
        let id = PartId::whole([1; 16], [number as u8; 32]);
        let bytes = content(number, *len);
        let sum = checksum::of(&id, &bytes);
        let room = there.room(*len);
        let here = match op {
            Op::Read => {
                (room.fill)(&bytes);
                Buffer::from_vec(vec![0; *len])
            }
            Op::Write => Buffer::from_vec(bytes),
        };
        let (from, to) = match op {
            Op::Read => (room.buffer, here.clone()),
            Op::Write => (here.clone(), room.buffer),
        };
        memory.push(here);
        batch.part(&id, &[from], &[to], Some(sum), 0).unwrap();
    }
    let (sender, ended) = mpsc::channel();
    let ticket = copier.submit(batch, move |done| {
        let parts = done.parts().map(|(_, part)| part.map(|part| part.matches));
        sender.send(parts.collect()).unwrap();
    });
    assert!(ticket.wait(Some(LONG)), "a batch hangs");
    (ended.recv().unwrap(), memory)
}

type Answer = std::result::Result<Option<bool>, Failure>;

const LENS: [usize; 6] = [1, 5000, 70_001, 1 << 20, (3 << 20) + 77, 4096];

fn errno(errno: i32) -> Answer {
    Err(Failure::Os { errno })
}

/// As [`run`], again where the machine stood still for longer than the hands wait.
fn in_the_end(copier: &Copier, there: &There, op: Op, lens: &[usize]) -> Ran {
    let (end, late) = (Instant::now() + LONG, errno(libc::ETIMEDOUT));
    let mut runs = std::iter::repeat_with(|| run(copier, there, op, lens));
    let ran = runs.find(|ran| !ran.0.contains(&late) || Instant::now() > end);
    ran.unwrap()
}

/// All of it, both ways, by what is in the file and in memory.
fn moves(copier: &Copier, there: &There) {
    for op in [Op::Read, Op::Write] {
        let (parts, memory) = in_the_end(copier, there, op, &LENS);
        assert_eq!(parts, [Ok(Some(true)); LENS.len()], "{op:?}");
        for (number, (memory, len)) in memory.iter().zip(LENS).enumerate() {
            assert!(memory.to_vec() == content(number, len), "{op:?} {len}");
        }
        if op == Op::Write {
            let mut end = *there.end.lock().unwrap();
            for (number, len) in LENS.iter().enumerate().rev() {
                end -= len;
                let mut bytes = vec![0; *len];
                there.plain.read_exact_at(&mut bytes, end as u64).unwrap();
                assert!(bytes == content(number, *len), "{len}");
            }
        }
    }
}

#[test]
fn what_goes_through_the_slab_is_not_copied_again() {
    let mounted = Mounted::new();
    let hands = mounted.hands(LONG);
    let there = There::new(&mounted, &hands);
    let before = mounted.links();
    let copier = copier(8 << 20, 2);
    moves(&copier, &there);
    assert_eq!(hands.bounced(), 0);
    assert_eq!(mounted.links(), before + 1, "the slab, once");
    let others = mounted.hands(LONG);
    moves(&copier, &There::new(&mounted, &others));
    assert_eq!(others.bounced(), 0);
    drop((copier, there, hands, others));
    mounted.is_left();
}

#[test]
fn memory_that_3fs_does_not_know_is_copied_through_some_that_it_does() {
    let mounted = Mounted::new();
    for (refused, reads_short) in [(1, 0), (1, 1)] {
        mounted.say("double_refuse", refused);
        mounted.say("double_short_all", reads_short);
        let hands = mounted.hands(LONG);
        let there = There::new(&mounted, &hands);
        let copier = copier(8 << 20, 2);
        moves(&copier, &there);
        assert!(hands.bounced() >= 2 * LENS.len() as u64);
        mounted.say("double_short_all", 0);
        drop((copier, there, hands));
        mounted.is_left();
    }
    // And none of its own.
    mounted.say("double_refuse", 3);
    let hands = mounted.hands(LONG);
    let there = There::new(&mounted, &hands);
    let (parts, _) = run(&copier(1 << 20, 4), &there, Op::Read, &[5000; 3]);
    assert_eq!(parts, [errno(libc::ENOMEM); 3]);
    mounted.say("double_refuse", 0);
}

#[test]
fn memory_that_was_refused_for_a_moment_is_taken_a_moment_later() {
    let mounted = Mounted::new();
    mounted.say("double_refuse", 3);
    let hands = mounted.hands(LONG);
    let there = There::new(&mounted, &hands);
    let copier = copier(8 << 20, 2);
    let (parts, _) = run(&copier, &there, Op::Read, &[5000; 3]);
    assert_eq!(parts, [errno(libc::ENOMEM); 3]);
    // Some of its own, and then that of the slab.
    for (refused, is_copied) in [(1, true), (0, false)] {
        mounted.say("double_refuse", refused);
        std::thread::sleep(PAUSE);
        let before = hands.bounced();
        moves(&copier, &there);
        assert_eq!(hands.bounced() > before, is_copied);
    }
    drop((copier, there, hands));
    mounted.is_left();
}

#[test]
fn an_error_costs_the_parts_that_had_it_and_what_is_short_goes_on() {
    let mounted = Mounted::new();
    let hands = mounted.hands(LONG);
    let there = There::new(&mounted, &hands);
    let copier = copier(1 << 20, 4);
    for (op, error) in [(Op::Read, libc::EIO), (Op::Write, libc::ENOSPC)] {
        mounted.say("double_fail_with", i64::from(error));
        mounted.say("double_fail", 3);
        let (parts, _) = run(&copier, &there, op, &[200_000; 9]);
        assert!(parts.contains(&errno(error)), "{parts:?}");
        let good = parts.iter().filter(|part| **part == Ok(Some(true)));
        let good = good.count();
        let bad = parts.iter().filter(|part| **part == errno(error)).count();
        assert!(good > 0 && good + bad == 9, "{parts:?}");
        mounted.say("double_fail", 0);
    }
    mounted.say("double_short_all", 1);
    moves(&copier, &there);
    mounted.say("double_short_all", 0);
    // Where the file ends, nobody has more.
    let room = there.room(5000);
    there
        .plain
        .set_len(*there.end.lock().unwrap() as u64 - 1000)
        .unwrap();
    let (mut batch, to) = (copier.batch(), Buffer::from_vec(vec![0; 5000]));
    let id = PartId::whole([0; 16], [0; 32]);
    batch.part(&id, &[room.buffer], &[to], None, 0).unwrap();
    let (sender, ended) = mpsc::channel();
    let ticket = copier.submit(batch, move |done| {
        let (_, part) = done.part(0).unwrap();
        sender.send(part.map(|_| ())).unwrap();
    });
    assert!(ticket.wait(Some(LONG)));
    let (carried, asked) = (4000, 5000);
    assert_eq!(
        ended.recv().unwrap(),
        Err(Failure::Short { carried, asked })
    );
}

#[test]
fn what_does_not_complete_is_waited_for_so_long_and_keeps_its_region() {
    let mounted = Mounted::new();
    for refused in [0, 1] {
        mounted.say("double_refuse", refused);
        let patience = Duration::from_millis(500);
        let hands = mounted.hands(patience);
        let there = There::new(&mounted, &hands);
        let copier = copier(1 << 20, 4);
        moves(&copier, &there);
        mounted.say("double_lose_all", 1);
        for op in [Op::Read, Op::Write] {
            let (parts, memory) = run(&copier, &there, op, &[200_000; 9]);
            assert!(parts.iter().all(|part| part.is_err()), "{parts:?}");
            assert!(mounted.ask("double_lost") > 0);
            assert!(copier.free_regions() < 4 || refused == 1);
            // What comes after all is not the caller's any more.
            let now = memory.iter().map(Buffer::to_vec).collect::<Vec<_>>();
            mounted.say("double_lose_all", 0);
            mounted.ask("double_answer");
            let end = Instant::now() + LONG;
            while copier.free_regions() < 4 {
                assert!(Instant::now() < end, "its regions do not come back");
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(memory.iter().map(Buffer::to_vec).eq(now), "{op:?}");
            moves(&copier, &there);
            mounted.say("double_lose_all", 1);
        }
        // Two rings that do not answer are all there are of a direction: one request is to find out
        // whether they do again, and what comes beside it fails at once.
        run(&copier, &there, Op::Read, &[200_000; 9]);
        // What they lose keeps its regions.
        let mut fresh = Vec::new();
        // Whether the second batch ended beside the probe: a thread that stands still is late.
        let beside_a_probe = || {
            std::thread::sleep(patience);
            let copiers = [(); 2].map(|()| self::copier(1 << 20, 4));
            let asked = mounted.ask("double_ios");
            let ended_beside = std::thread::scope(|scope| {
                let probe = scope.spawn(|| run(&copiers[0], &there, Op::Read, &[5000]).0);
                while mounted.ask("double_ios") == asked && !probe.is_finished() {
                    std::thread::yield_now();
                }
                let (parts, _) = run(&copiers[1], &there, Op::Read, &[5000; 3]);
                let ended_beside = !probe.is_finished();
                assert_eq!(parts, [errno(libc::ETIMEDOUT); 3]);
                assert!(probe.join().unwrap()[0].is_err());
                ended_beside
            });
            fresh.push(copiers);
            ended_beside && mounted.ask("double_ios") == asked + 1
        };
        let is_beside = std::iter::repeat_with(beside_a_probe).take(5).any(|is| is);
        assert!(is_beside, "what comes beside a probe waits for it");
        mounted.say("double_lose_all", 0);
        mounted.ask("double_answer");
        drop((copier, fresh, there, hands));
        mounted.is_left();
    }
    mounted.say("double_refuse", 0);
}

#[test]
fn a_ring_that_has_lost_requests_is_asked_again_as_long_as_half_of_it_is_free() {
    let mounted = Mounted::new();
    let patience = Duration::from_millis(300);
    // Eight entries of one ring.
    let config = UsrbioConfig {
        streams: 1,
        running: 16,
        ..mounted.config(patience)
    };
    let hands = open(&config);
    let there = There::new(&mounted, &hands);
    let mut at_first = 0;
    for op in [Op::Read, Op::Write] {
        for lost in 1..=3 {
            mounted.say("double_lose", 1);
            let (parts, _) = run(&copier(1 << 20, 4), &there, op, &[5000]);
            assert!(parts[0].is_err());
            assert_eq!(mounted.ask("double_lost"), lost);
            mounted.say("double_lose", 0);
            for _ in 0..2 {
                std::thread::sleep(patience);
                // What comes with the probe waits for its answer.
                let (copier, all) = (copier(1 << 20, 4), [Ok(Some(true)); 9]);
                at_first += usize::from(run(&copier, &there, op, &[5000; 9]).0 == all);
                let (parts, _) = in_the_end(&copier, &there, op, &[5000; 9]);
                assert_eq!(parts, all, "{op:?}, {lost} lost");
            }
        }
        // Probes are lost too, until half of the entries are.
        mounted.say("double_lose_all", 1);
        for lost in [4, 5, 5] {
            std::thread::sleep(patience);
            let (parts, _) = run(&copier(1 << 20, 4), &there, op, &[5000]);
            assert!(parts[0].is_err());
            assert_eq!(mounted.ask("double_lost"), lost);
        }
        mounted.say("double_lose_all", 0);
        mounted.ask("double_answer");
        let end = Instant::now() + LONG;
        while run(&copier(1 << 20, 4), &there, op, &[5000]).0 != [Ok(Some(true))] {
            assert!(Instant::now() < end, "what was lost has come");
        }
    }
    assert!(at_first > 0, "what comes with a probe fails");
    drop((there, hands));
    mounted.is_left();
}

#[test]
fn a_ring_without_room_lets_so_many_wait() {
    let mounted = Mounted::new();
    let config = UsrbioConfig {
        streams: 1,
        running: 2,
        ..mounted.config(LONG)
    };
    let hands = Hands::usrbio(&config).unwrap();
    let there = There::new(&mounted, &hands);
    let copier = copier(1 << 20, 8);
    moves(&copier, &there);
    // It is full though it should not be, with nothing under way to tell when it is not.
    mounted.say("double_full", 20);
    moves(&copier, &there);
    assert_eq!(mounted.ask("double_misused"), 0);
    let waiting = 0;
    let hands = Hands::usrbio(&UsrbioConfig { waiting, ..config }).unwrap();
    let there = There::new(&mounted, &hands);
    // What was full with nothing under way is asked again.
    mounted.say("double_full", 1);
    let (parts, _) = run(&copier, &there, Op::Read, &[5000]);
    assert_eq!(parts, [errno(libc::EBUSY)]);
    let (parts, _) = run(&copier, &there, Op::Read, &[5000]);
    assert_eq!(parts, [Ok(Some(true))]);
    mounted.say("double_delay", 20_000);
    let (parts, _) = run(&copier, &there, Op::Read, &[100_000; 12]);
    mounted.say("double_delay", 0);
    assert!(parts.contains(&errno(libc::EBUSY)), "{parts:?}");
    assert!(parts.contains(&Ok(Some(true))), "{parts:?}");
}

#[test]
fn a_file_that_3fs_does_not_take_says_why_and_a_number_it_still_has_is_taken_anew() {
    let mounted = Mounted::new();
    let (hands, copier) = (mounted.hands(LONG), copier(1 << 20, 4));
    mounted.say("double_refuse", 8);
    let there = There::new(&mounted, &hands);
    let (parts, _) = run(&copier, &there, Op::Read, &[5000; 3]);
    assert_eq!(parts, [errno(libc::EBADF); 3]);
    mounted.say("double_refuse", 0);
    drop(there);
    // Somebody closes a file that is registered; what is opened next has its number.
    let path = mounted.folder.path().join("closed");
    let closed = std::fs::File::create(&path).unwrap();
    mounted.say("hf3fs_reg_fd", i64::from(closed.as_raw_fd()));
    drop(closed);
    let many = (0..20).map(|_| There::new(&mounted, &hands));
    for there in many.collect::<Vec<_>>() {
        moves(&copier, &there);
    }
    drop((copier, hands));
    mounted.is_left();
}

#[test]
fn a_mount_that_hangs_keeps_nobody_else() {
    let mounted = Mounted::new();
    let hands = mounted.hands(Duration::from_millis(60));
    let (there, copier) = (There::new(&mounted, &hands), copier(1 << 20, 4));
    mounted.say("double_hang", 1);
    let (parts, _) = run(&copier, &there, Op::Read, &[5000; 9]);
    assert!(parts.iter().all(|part| part.is_err()), "{parts:?}");
    let late = Hands::usrbio(&mounted.config(Duration::from_millis(20)));
    assert!(late.unwrap_err().to_string().contains("timed out"));
    // Closing a file asks the mount too.
    drop(there);
    mounted.say("double_hang", 0);
    drop((copier, hands));
    mounted.is_left();
}

#[test]
fn what_is_under_way_when_all_is_let_go_is_done() {
    let mounted = Mounted::new();
    mounted.say("double_delay", 5000);
    for _ in 0..5 {
        let hands = mounted.hands(LONG);
        let (there, copier) = (There::new(&mounted, &hands), copier(1 << 20, 4));
        let mut batch = copier.batch();
        for number in 0..9 {
            let id = PartId::whole([1; 16], [number; 32]);
            let (room, to) = (there.room(100_000), Buffer::from_vec(vec![0; 100_000]));
            batch.part(&id, &[room.buffer], &[to], None, 0).unwrap();
        }
        let ticket = copier.submit(batch, |done| assert!(done.is_clean()));
        drop((there, hands));
        assert!(ticket.wait(Some(LONG)));
        drop(copier);
        mounted.is_left();
    }
    mounted.say("double_delay", 0);
}

#[test]
fn what_is_missing_is_named() {
    let mounted = Mounted::new();
    let refusal = |config: UsrbioConfig| Hands::usrbio(&config).unwrap_err().to_string();
    let with = mounted.config(LONG);
    let library = PathBuf::from("/nonexistent/libhf3fs_api_shared.so");
    let message = refusal(UsrbioConfig {
        library,
        ..with.clone()
    });
    assert!(
        message.contains("/nonexistent/libhf3fs_api_shared.so: cannot open"),
        "{message}"
    );
    let library = PathBuf::from("libc.so.6");
    let message = refusal(UsrbioConfig {
        library,
        ..with.clone()
    });
    assert!(message.contains("no function hf3fs_iovcreate"), "{message}");
    let path = PathBuf::from("/proc");
    let message = refusal(UsrbioConfig {
        path,
        ..with.clone()
    });
    let said = "3FS mount (fuse.hf3fs) of /proc";
    assert!(message.contains(said), "{message}");
    let message = refusal(UsrbioConfig {
        streams: 0,
        ..with.clone()
    });
    assert!(
        message.contains("stream_number: 0 is not allowed; allowed: 1 to 64"),
        "{message}"
    );
    mounted.say("double_refuse", 4);
    assert!(refusal(with).contains("hf3fs_iorcreate4"));
    mounted.say("double_refuse", 0);
}
