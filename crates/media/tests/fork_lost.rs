//! What is watched for lost memory is the process's that mapped it, and not its children's: alone
//! in its process, because it forks.

#![expect(
    unsafe_code,
    reason = "forks, handles faults, and maps memory of a child's own"
)]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvdepot_media::{Access, Copier, CopierConfig, Mapping, page_size};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// One test at a time: a child must not find what the other's thread had locked.
static TURN: Mutex<()> = Mutex::new(());

/// Pages of the parent's mapping: room for all that a child maps.
const PAGES: usize = 4096;

/// Live memory of the child, and what the test's own handler of `SIGBUS` finds there.
static LIVE: AtomicUsize = AtomicUsize::new(0);
const LIVE_PAGES: usize = 20;

/// How the child ends.
const INTACT: i32 = 40;
const OVERWRITTEN: i32 = 41;
const PASSED_OVER: i32 = 42;

fn live_is_intact() -> bool {
    let live = LIVE.load(Ordering::SeqCst);
    (0..LIVE_PAGES).all(|page| {
        let at: *const u8 = std::ptr::with_exposed_provenance(live + page * page_size());
        // SAFETY: mapped by the child, readable.
        unsafe { at.read_volatile() == page as u8 + 1 }
    })
}

/// The handler that was there before kvdepot's: a fault that is none of kvdepot's comes here.
extern "C" fn ends_the_child(_signal: libc::c_int) {
    let intact = live_is_intact();
    // SAFETY: ends this process; a handler may call it.
    unsafe { libc::_exit(if intact { INTACT } else { OVERWRITTEN }) }
}

/// Maps a page at `at`, where nothing is.
fn map_at(at: usize, file: Option<&File>) -> *mut u8 {
    let shared = file.map_or(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, |_| {
        libc::MAP_SHARED
    });
    let flags = shared | libc::MAP_FIXED_NOREPLACE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let fd = file.map_or(-1, AsRawFd::as_raw_fd);
    let wanted = std::ptr::with_exposed_provenance_mut(at);
    // SAFETY: the flag refuses to replace anything.
    let got = unsafe { libc::mmap(wanted, page_size(), protection, flags, fd, 0) };
    assert_eq!(got, wanted);
    got.cast()
}

/// A child's own memory where the parent had its mapping; a fault among it is the child's own.
fn faults_elsewhere(at: usize, directory: &Path) -> i32 {
    let page = page_size();
    LIVE.store(at + page, Ordering::SeqCst);
    for number in 0..LIVE_PAGES {
        let live = map_at(at + page * (number + 1), None);
        // SAFETY: just mapped.
        unsafe { live.write_volatile(number as u8 + 1) };
    }
    // Empty: its page is behind the end.
    let short = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(directory.join("short"))
        .unwrap();
    let faulty = map_at(at, Some(&short));
    // SAFETY: mapped; the touch is a fault, which does not come back.
    std::hint::black_box(unsafe { faulty.read_volatile() });
    PASSED_OVER
}

/// A mapping that the child makes is watched like any other, wherever it lands.
fn own_mapping_is_watched(directory: &Path) -> i32 {
    let path = directory.join("own");
    let mapping = Mapping::create(&path, 64 << 10).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(4 << 10).unwrap();
    mapping.read_into(8 << 10, &mut [0; 8]).unwrap();
    let told = [0, 8 << 10].map(|at| mapping.is_lost(at, 4 << 10).unwrap());
    let anew = Mapping::open(&path, Access::ReadWrite).unwrap();
    match (told, anew.losses()) {
        ([false, true], 0) => INTACT,
        _ => PASSED_OVER,
    }
}

/// The status of a child that does `child`.
fn in_child(child: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child calls nothing that another thread could hold locked: there is none but the
    // test's runner, which waits, and the other test's, which waits too.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(100);
        // SAFETY: ends this process without the parent's exit handlers.
        unsafe { libc::_exit(code) }
    }
    let mut status = 0;
    // SAFETY: waits for the child just made.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status), "status {status:#x}");
    libc::WEXITSTATUS(status)
}

#[test]
fn a_forked_child_watches_nothing_of_its_parents() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the handler only reads memory and ends the process.
    unsafe {
        let handler: extern "C" fn(libc::c_int) = ends_the_child;
        libc::signal(libc::SIGBUS, handler as libc::sighandler_t);
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("arena");
    let len = (PAGES * page_size()) as u64;
    let memory = Mapping::create(&path, len).unwrap();
    let at = memory.buffer(0, 1).unwrap().addr();
    // What is behind the end is replaced as a whole, were it watched.
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(1)
        .unwrap();

    assert_eq!(in_child(|| faults_elsewhere(at, directory.path())), INTACT);
    assert_eq!(
        in_child(|| own_mapping_is_watched(directory.path())),
        INTACT
    );
    let forgotten = || match (memory.is_lost(0, 1), memory.losses()) {
        (Ok(true), 0) => INTACT,
        _ => PASSED_OVER,
    };
    assert_eq!(in_child(forgotten), INTACT, "nothing of it is there");

    // The parent's is watched as before.
    memory.read_into(len / 2, &mut [0; 8]).unwrap();
    assert!(memory.is_lost(len / 2, 8).unwrap() && !memory.is_lost(0, 1).unwrap());
}

/// In a process-number namespace of its own a child can have its parent's number.
#[test]
fn a_forked_child_with_its_parents_number_is_told_apart() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let flags = libc::CLONE_NEWUSER | libc::CLONE_NEWPID;
    let first = || {
        // The first process of a namespace, which makes another one.
        let copier = Copier::new(CopierConfig::default()).unwrap();
        let memory = Mapping::anonymous("kvdepot-test", 1 << 20).unwrap();
        let at = memory.buffer(0, 1).unwrap().addr();
        let number = std::process::id();
        // SAFETY: changes where later children are numbered.
        if unsafe { libc::unshare(libc::CLONE_NEWPID) } != 0 {
            return PASSED_OVER;
        }
        in_child(move || {
            assert_eq!(std::process::id(), number);
            // Waits for no lane, and takes nothing of its own away with it.
            let own = map_at(at, None);
            drop((copier, memory));
            // SAFETY: mapped above, unless it has gone with the parent's mapping.
            unsafe { own.write_volatile(1) };
            INTACT
        })
    };
    // Threads share their user namespace: only a child can have another.
    let outer = in_child(|| {
        // SAFETY: this process has one thread.
        match unsafe { libc::unshare(flags) } {
            0 => in_child(first),
            _ => PASSED_OVER,
        }
    });
    if outer == PASSED_OVER {
        eprintln!("skipped: this system makes no namespaces for its users");
        return;
    }
    assert_eq!(outer, INTACT);
}
