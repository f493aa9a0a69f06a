//! Memory that fails under a mapping: a file is truncated, and the process lives.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvdepot_media::{Access, Buffer, Checksum, Copier, CopierConfig, Failure, Mapping, PartId};
use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

const LEN: u64 = 4 << 20;
const HALF: u64 = LEN / 2;
const BLOCK: u64 = 64 << 10;

fn file(directory: &Path) -> (File, Arc<Mapping>) {
    let path = directory.join("arena");
    let mapping = Mapping::create(&path, LEN).unwrap();
    (File::options().write(true).open(path).unwrap(), mapping)
}

fn copier() -> Copier {
    let mut config = CopierConfig::default();
    config.lanes = 2;
    Copier::new(config).unwrap()
}

fn id(number: u64) -> PartId {
    PartId {
        namespace: [3; 16],
        key: [number as u8; 32],
        part: 0,
        parts: 1,
    }
}

type Parts = Vec<Result<(Checksum, Option<bool>), Failure>>;

/// Copies pairs of buffers, each with the checksum that is expected of it.
fn copy(copier: &Copier, pairs: &[(Buffer, Buffer, Option<Checksum>)]) -> Parts {
    let mut batch = copier.batch();
    for (number, (from, to, expected)) in (0..).zip(pairs) {
        let (from, to) = (std::slice::from_ref(from), std::slice::from_ref(to));
        batch.part(&id(number), from, to, *expected, 0).unwrap();
    }
    let (sender, receiver) = mpsc::channel();
    let ticket = copier.submit(batch, move |done| {
        let parts = done.parts().map(|(_, part)| part);
        let parts: Parts = parts.map(|p| p.map(|o| (o.checksum, o.matches))).collect();
        sender.send(parts).unwrap();
    });
    assert!(ticket.wait(Some(Duration::from_secs(60))), "hangs");
    receiver.recv().unwrap()
}

/// Every block of the mapping, written with its number.
fn filled(copier: &Copier, mapping: &Arc<Mapping>) -> Vec<Checksum> {
    let block = |number| Buffer::from_vec(vec![number as u8 + 1; BLOCK as usize]);
    let pairs: Vec<_> = (0..LEN / BLOCK)
        .map(|at| (block(at), mapping.buffer(at * BLOCK, BLOCK).unwrap(), None))
        .collect();
    let parts = copy(copier, &pairs);
    parts.into_iter().map(|part| part.unwrap().0).collect()
}

fn read_back(copier: &Copier, mapping: &Arc<Mapping>, sums: &[Checksum]) -> Parts {
    let read = |(at, sum): (u64, &Checksum)| {
        let from = mapping.buffer(at * BLOCK, BLOCK).unwrap();
        let to = Buffer::from_vec(vec![0; BLOCK as usize]);
        (from, to, Some(*sum))
    };
    copy(copier, &(0..).zip(sums).map(read).collect::<Vec<_>>())
}

#[test]
fn what_is_read_from_lost_memory_does_not_verify_and_the_rest_does() {
    let directory = tempfile::tempdir().unwrap();
    let (file, mapping) = file(directory.path());
    let copier = copier();
    let sums = filled(&copier, &mapping);
    file.set_len(HALF).unwrap();
    for (at, part) in (0..).zip(read_back(&copier, &mapping, &sums)) {
        let there = at * BLOCK < HALF;
        assert_eq!(part.unwrap().1, Some(there), "block {at}");
        assert_eq!(mapping.is_lost(at * BLOCK, BLOCK).unwrap(), !there);
    }
    assert!(mapping.losses() > 0);
    assert!(mapping.is_lost(0, LEN + 1).is_err());
}

#[test]
fn what_is_written_to_lost_memory_is_said_to_be_lost() {
    let directory = tempfile::tempdir().unwrap();
    let (file, mapping) = file(directory.path());
    let copier = copier();
    file.set_len(HALF).unwrap();
    let block = || Buffer::from_vec(vec![7; BLOCK as usize]);
    let to = |offset| mapping.buffer(offset, BLOCK).unwrap();
    let pairs = [0, HALF, HALF - BLOCK, LEN - BLOCK].map(|at| (block(), to(at), None));
    let parts = copy(&copier, &pairs);
    let lost: Vec<bool> = parts
        .iter()
        .map(|part| *part == Err(Failure::MemoryLost))
        .collect();
    assert_eq!(lost, [false, true, false, true]);
    // Nor can it be had back: the file is as long again, and this mapping does not see it.
    file.set_len(LEN).unwrap();
    assert_eq!(
        copy(&copier, &[(block(), to(HALF), None)])[0],
        Err(Failure::MemoryLost)
    );
}

#[test]
fn what_is_lost_stays_lost_where_the_file_grows() {
    let directory = tempfile::tempdir().unwrap();
    let (file, mapping) = file(directory.path());
    let copier = copier();
    file.set_len(HALF).unwrap();
    let block = Buffer::from_vec(vec![7; BLOCK as usize]);
    let to = mapping.buffer(HALF, BLOCK).unwrap();
    assert!(copy(&copier, &[(block, to, None)])[0].is_err());
    file.set_len(LEN).unwrap();
    let grown = mapping.grown(2 * LEN).unwrap();
    let lost = [0, HALF, LEN].map(|at| grown.is_lost(at, BLOCK).unwrap());
    assert_eq!(lost, [false, true, false]);
}

#[test]
fn losing_memory_while_it_is_read_and_written_ends_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (file, mapping) = file(directory.path());
    let copier = copier();
    let sums = filled(&copier, &mapping);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for (at, part) in (0..).zip(read_back(&copier, &mapping, &sums)) {
                        let sound = part.unwrap().1 == Some(true);
                        assert!(sound || at * BLOCK >= HALF, "block {at}");
                    }
                    filled_or_lost(&copier, &mapping, &sums);
                }
            });
        }
        std::thread::sleep(Duration::from_millis(30));
        file.set_len(HALF).unwrap();
        std::thread::sleep(Duration::from_millis(60));
        stop.store(true, Ordering::Relaxed);
    });
    assert!(mapping.is_lost(HALF, BLOCK).unwrap());
    assert!(!mapping.is_lost(0, HALF).unwrap());
}

/// Writes every block as it is; those that are lost say so.
fn filled_or_lost(copier: &Copier, mapping: &Arc<Mapping>, sums: &[Checksum]) {
    let block = |number| Buffer::from_vec(vec![number as u8 + 1; BLOCK as usize]);
    let pairs: Vec<_> = (0..LEN / BLOCK)
        .map(|at| (block(at), mapping.buffer(at * BLOCK, BLOCK).unwrap(), None))
        .collect();
    for (at, (part, sum)) in (0..).zip(copy(copier, &pairs).into_iter().zip(sums)) {
        match part {
            Ok((stored, _)) => assert_eq!(stored, *sum),
            Err(failure) => assert!(failure == Failure::MemoryLost && at * BLOCK >= HALF),
        }
    }
}

/// Mappings come and go; what one has lost is not held against the next one at its place.
#[test]
fn a_new_mapping_has_lost_nothing() {
    for _ in 0..600 {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("small");
        let mapping = Mapping::create(&path, 8192).unwrap();
        assert!(!mapping.is_lost(0, 8192).unwrap());
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(4096)
            .unwrap();
        mapping.read_into(4096, &mut [1; 16]).unwrap();
        assert!(mapping.is_lost(4000, 200).unwrap() && !mapping.is_lost(0, 4096).unwrap());
        drop(mapping);
        let again = Mapping::open(&path, Access::ReadWrite).unwrap();
        assert_eq!((again.len(), again.losses()), (4096, 0));
    }
}

/// The page that a file ends in is a page of the file: where it fails, reading it again would fail
/// again.
#[test]
fn a_fault_in_the_last_page_of_a_truncated_file_loses_that_page() {
    for ends_the_mapping in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("small");
        let len = if ends_the_mapping { 4096 } else { 16384 };
        let mapping = Mapping::create(&path, len).unwrap();
        mapping.write_from(0, &[7; 64]).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(100).unwrap();
        fault_at(mapping.buffer(50, 1).unwrap().addr());
        let mut read = [1; 64];
        mapping.read_into(0, &mut read).unwrap();
        assert_eq!(read, [0; 64], "what failed is gone");
        assert!(mapping.is_lost(0, 10).unwrap());
        assert_eq!(mapping.losses(), 1);
    }
}

/// What the kernel does where a page of a file cannot be read.
#[expect(unsafe_code, reason = "a signal with an address")]
fn fault_at(addr: usize) {
    // SAFETY: all zeros are a valid `siginfo_t`; a process may send any to itself.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        info.si_signo = libc::SIGBUS;
        info.si_code = libc::BUS_ADRERR;
        // Behind the three integers and what aligns the union.
        let fields = (&raw mut info).cast::<usize>();
        fields.add(2).write(addr);
        assert_eq!(info.si_addr() as usize, addr);
        let (process, thread) = (libc::getpid(), libc::gettid());
        let sent = libc::syscall(
            libc::SYS_rt_tgsigqueueinfo,
            process,
            thread,
            libc::SIGBUS,
            &raw const info,
        );
        assert_eq!(sent, 0);
    }
}

/// Whoever sets another action for the signal takes the protection away, until the next mapping.
#[test]
fn the_handler_is_installed_again_with_the_next_mapping() {
    for way in ["default", "chained", "raised"] {
        let status = in_process("survives", way);
        assert!(status.success(), "{way}: {status}");
    }
}

/// Runs a test of this file in a process of its own.
fn in_process(test: &str, way: &str) -> std::process::ExitStatus {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env(DYING, way)
        .status()
        .unwrap()
}

/// What somebody else's handler found when it was installed, as its address.
static FOUND: AtomicUsize = AtomicUsize::new(0);

/// How often it was called.
static CALLED: AtomicUsize = AtomicUsize::new(0);

/// Another library's handler, which leaves what is none of its to the one before.
extern "C" fn chained(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    CALLED.fetch_add(1, Ordering::SeqCst);
    let found = FOUND.load(Ordering::SeqCst);
    #[expect(unsafe_code, reason = "calls what it has found")]
    // SAFETY: kvdepot's handler, which is of this type.
    unsafe {
        let before: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
            std::mem::transmute(found);
        before(signal, info, context);
    }
}

/// A handler as that of Python's `faulthandler`: it reports, sets the one before and raises the
/// signal again.
extern "C" fn raised(signal: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    CALLED.fetch_add(1, Ordering::SeqCst);
    set_action(FOUND.load(Ordering::SeqCst));
    #[expect(unsafe_code, reason = "raises a signal")]
    // SAFETY: a handler may.
    unsafe {
        libc::raise(signal)
    };
}

/// Sets the action of the signal, and answers the one before.
#[expect(unsafe_code, reason = "what another library does")]
fn set_action(action: usize) -> usize {
    // SAFETY: the handlers of this file do what a handler may.
    unsafe {
        let (mut new, mut old): (libc::sigaction, libc::sigaction) =
            (std::mem::zeroed(), std::mem::zeroed());
        new.sa_sigaction = action;
        new.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
        assert_eq!(
            libc::sigaction(libc::SIGBUS, &raw const new, &raw mut old),
            0
        );
        old.sa_sigaction
    }
}

type Action = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);

/// Loses memory of a mapping.
fn lose(directory: &Path, name: &str) {
    let path = directory.join(name);
    let mapping = Mapping::create(&path, 8192).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(4096).unwrap();
    mapping.read_into(4096, &mut [1; 16]).unwrap();
    assert!(mapping.is_lost(4096, 16).unwrap() && !mapping.is_lost(0, 4096).unwrap());
}

#[test]
#[ignore = "the part of another process in the test above"]
fn survives() {
    let Ok(way) = std::env::var(DYING) else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    lose(directory.path(), "first");
    // More often than there are predecessors to be told apart.
    for turn in 0..20 {
        let action = match way.as_str() {
            "default" => libc::SIG_DFL,
            "chained" => chained as Action as usize,
            _ => raised as Action as usize,
        };
        let found = set_action(action);
        if found != action {
            FOUND.store(found, Ordering::SeqCst);
        }
        lose(directory.path(), &format!("{turn}"));
    }
    assert_eq!(CALLED.load(Ordering::SeqCst), 0, "a loss is nobody else's");
}

const DYING: &str = "KVDEPOT_TEST_DYING";

/// Runs `dies` of this file in a process of its own, which `SIGBUS` must end.
#[test]
fn faults_elsewhere_and_signals_from_others_still_end_the_process() {
    for way in ["fault", "kill", "fault-chained", "fault-raised"] {
        let status = in_process("dies", way);
        assert_eq!(status.signal(), Some(7), "{way}: {status}");
    }
}

#[test]
#[ignore = "the part of another process in the test above"]
fn dies() {
    let Ok(way) = std::env::var(DYING) else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let (_file, _mapping) = file(directory.path());
    // Somebody's handler between two of ours, which must not send the fault round in circles.
    let between = match way.as_str() {
        "fault-chained" => Some(chained as Action),
        "fault-raised" => Some(raised as Action),
        _ => None,
    };
    if let Some(action) = between {
        FOUND.store(set_action(action as usize), Ordering::SeqCst);
        lose(directory.path(), "second");
    }
    if way == "kill" {
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::BUS)
            .unwrap();
    }
    // Somebody else's mapping, of a file that is too short.
    let path = directory.path().join("other");
    let other = File::create_new(&path).unwrap();
    other.set_len(4096).unwrap();
    touch_somebody_elses(&other);
    panic!("alive");
}

#[expect(unsafe_code, reason = "a mapping that is not this crate's")]
fn touch_somebody_elses(file: &File) {
    use rustix::mm::{MapFlags, ProtFlags};
    // SAFETY: a new mapping, whose second page is behind the end of the file.
    unsafe {
        let at = rustix::mm::mmap(
            std::ptr::null_mut(),
            8192,
            ProtFlags::READ,
            MapFlags::SHARED,
            file,
            0,
        );
        let byte: *const u8 = at.unwrap().cast();
        std::hint::black_box(byte.add(5000).read_volatile());
    }
}
