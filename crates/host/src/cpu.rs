//! Processor time of the threads of this process, and the processors on which they may run.

use std::fs;
use std::io;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::thread::CpuSet;

use super::{Error, Result};

/// The kernel keeps this many bytes of a thread's name.
const THREAD_NAME_MAX: usize = 15;

/// Returns the processor time that all threads of this process have used.
#[must_use]
pub fn process_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    // A clock of this process is never below zero.
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

/// Returns the processor time that the calling thread has used.
#[must_use]
pub fn time_of_this_thread() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

/// Returns the thread ID of the calling thread, as tools such as `ps` show it.
#[must_use]
pub fn this_thread() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// Requests that the processor loads a value into its caches. Unlike a read, the call does not wait
/// for the value.
#[inline]
pub fn prefetch<T>(value: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: it reads nothing, and the address is that of a reference.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = value;
}

/// Returns the processor time of all running threads of this process whose names start with
/// `prefix`.
///
/// The time counts from the start of each thread. Threads that have ended are not included, so the
/// sum decreases when a thread ends.
///
/// # Errors
///
/// [`Error::Input`] for a prefix that is longer than a thread name can be (15 bytes).
/// [`Error::Path`] or [`Error::Malformed`] if `/proc` cannot be read.
pub fn thread_time(prefix: &str) -> Result<Duration> {
    thread_time_in(Path::new("/proc/self/task"), prefix)
}

fn thread_time_in(tasks: &Path, prefix: &str) -> Result<Duration> {
    if prefix.len() > THREAD_NAME_MAX {
        return Err(Error::Input {
            field: "prefix",
            value: prefix.to_owned(),
            allowed: format!("at most {THREAD_NAME_MAX} bytes"),
        });
    }
    let mut total = Duration::ZERO;
    for entry in fs::read_dir(tasks).map_err(Error::path("list", tasks))? {
        let task = entry.map_err(Error::path("list", tasks))?.path();
        // A thread may end at any moment, between two of its files too.
        let Some(name) = read_if_there(&task.join("comm"))? else {
            continue;
        };
        if !name.starts_with(prefix) {
            continue;
        }
        total += task_time(&task)?.unwrap_or_default();
    }
    Ok(total)
}

/// Nanoseconds from the scheduler where it keeps them, else clock ticks.
fn task_time(task: &Path) -> Result<Option<Duration>> {
    let path = task.join("schedstat");
    if let Some(text) = read_if_there(&path)? {
        let nanoseconds = text
            .split_ascii_whitespace()
            .next()
            .and_then(|n| n.parse().ok());
        match nanoseconds {
            // Also what a kernel without these statistics answers.
            Some(0) => {}
            Some(nanoseconds) => return Ok(Some(Duration::from_nanos(nanoseconds))),
            None => return Err(Error::malformed(&path, text, "three numbers")),
        }
    }
    let path = task.join("stat");
    let Some(text) = read_if_there(&path)? else {
        return Ok(None);
    };
    let Some(ticks) = parse_ticks(&text) else {
        return Err(Error::malformed(&path, text, "the fields of proc(5)"));
    };
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    let seconds = Duration::from_secs(ticks / per_second);
    Ok(Some(
        seconds + Duration::from_nanos(ticks % per_second * 1_000_000_000 / per_second),
    ))
}

/// User and system time: fields 14 and 15, counted from behind the name in parentheses, which may
/// hold anything.
fn parse_ticks(text: &str) -> Option<u64> {
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    user.checked_add(system)
}

fn read_if_there(path: &Path) -> Result<Option<String>> {
    match fs::read(path) {
        Ok(text) => Ok(Some(String::from_utf8_lossy(&text).into_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(error) => Err(Error::path("read", path)(error)),
    }
}

/// Starts a thread named `name` that may run on every processor that the
/// [process may use](reset_affinity).
///
/// The affinity of the calling thread has no effect. If a sandbox forbids to change the affinity,
/// the thread keeps the caller's affinity and may be slower.
///
/// # Errors
///
/// The error of the system if the thread cannot be started.
pub fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let run = move || {
        drop(reset_affinity());
        run();
    };
    std::thread::Builder::new().name(name.into()).spawn(run)
}

/// Lets the calling thread run on every processor that its control group allows, at most on the
/// first 1024.
///
/// Returns the number of these processors. Engines pin their threads, and a thread inherits the
/// affinity of the thread that starts it. Without this call, all copy threads would share one
/// processor. The kernel limits the request to the control group's set.
///
/// # Errors
///
/// [`Error::Os`] if a sandbox forbids the call; the affinity is then unchanged.
pub fn reset_affinity() -> Result<usize> {
    let mut all = CpuSet::new();
    for cpu in 0..CpuSet::MAX_CPU {
        all.set(cpu);
    }
    rustix::thread::sched_setaffinity(None, &all)
        .map_err(Error::os("allow a thread to run on every processor"))?;
    affinity_count()
}

/// Sets the nice value of the calling thread only, 1 to 19; 0 leaves it unchanged.
///
/// If a sandbox forbids the call, the thread keeps its priority.
pub fn be_nice(nice: u8) {
    if nice > 0 {
        // For Linux, "the calling process" is the calling thread here.
        let _otherwise_slower = rustix::process::setpriority_process(None, i32::from(nice));
    }
}

/// Sets the scheduling policy of the calling thread only to `SCHED_BATCH`, so that it does not
/// preempt other threads when it wakes.
///
/// The thread runs immediately on an idle processor and otherwise waits for its turn. This is for
/// threads that work for a thread that must not be delayed, such as an engine's. If a sandbox
/// forbids the call, the policy is unchanged.
pub fn interrupt_nobody() {
    // SAFETY: the parameter is readable; 0 is the calling thread.
    unsafe {
        let mut parameter: libc::sched_param = std::mem::zeroed();
        parameter.sched_priority = 0;
        libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const parameter);
    }
}

/// Returns the number of processors on which the calling thread may run.
///
/// # Errors
///
/// [`Error::Os`] if a sandbox forbids the call.
pub fn affinity_count() -> Result<usize> {
    let set = rustix::thread::sched_getaffinity(None)
        .map_err(Error::os("get the processors on which a thread may run"))?;
    Ok(set.count().try_into().unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, mpsc};
    use std::thread;

    use super::*;

    #[test]
    fn one_thread_interrupts_nobody_and_others_stay_as_they_are() {
        // SAFETY: asks about the calling thread.
        let how = || unsafe { libc::sched_getscheduler(0) };
        let before = how();
        let (one, other) = (
            thread::spawn(move || {
                interrupt_nobody();
                how()
            }),
            thread::spawn(how),
        );
        assert_eq!(one.join().unwrap(), libc::SCHED_BATCH);
        assert_eq!((other.join().unwrap(), how()), (before, before));
    }

    fn named_thread(name: &str, busy: bool) -> (Arc<AtomicBool>, JoinHandle<()>) {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let (started, is_running) = mpsc::channel();
        let handle = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                started.send(()).unwrap();
                while !stopped.load(Ordering::Relaxed) {
                    if busy {
                        std::hint::spin_loop();
                    } else {
                        thread::sleep(Duration::from_millis(1));
                    }
                }
            })
            .unwrap();
        is_running.recv().unwrap();
        (stop, handle)
    }

    #[test]
    fn only_threads_with_the_prefix_count() {
        let (stop_busy, busy) = named_thread("cputest-busy-0", true);
        let (stop_idle, idle) = named_thread("cputest-idle-0", false);
        let want = Duration::from_millis(60);
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while thread_time("cputest-busy").unwrap() < want {
            assert!(
                std::time::Instant::now() < deadline,
                "a busy thread used no time"
            );
            thread::sleep(Duration::from_millis(5));
        }
        let busy_time = thread_time("cputest-busy").unwrap();
        let idle_time = thread_time("cputest-idle").unwrap();
        let both = thread_time("cputest-").unwrap();
        assert!(idle_time < want, "{idle_time:?}");
        assert!(
            both >= busy_time + idle_time,
            "{both:?} {busy_time:?} {idle_time:?}"
        );
        assert_eq!(thread_time("cputest-absent").unwrap(), Duration::ZERO);
        stop_busy.store(true, Ordering::Relaxed);
        stop_idle.store(true, Ordering::Relaxed);
        busy.join().unwrap();
        idle.join().unwrap();
        assert_eq!(thread_time("cputest-busy").unwrap(), Duration::ZERO);
    }

    #[test]
    fn a_prefix_longer_than_a_name_is_refused() {
        let error = thread_time("sixteen-letters-").unwrap_err();
        assert!(
            matches!(
                error,
                Error::Input {
                    field: "prefix",
                    ..
                }
            ),
            "{error}"
        );
    }

    #[test]
    fn clock_ticks_serve_where_the_scheduler_keeps_no_nanoseconds() {
        let root = tempfile::tempdir().unwrap();
        let task = root.path().join("7");
        fs::create_dir(&task).unwrap();
        fs::write(task.join("comm"), "lane-0\n").unwrap();
        let stat = "7 (la) ne) S 1 42 42 0 -1 4194560 5 6 7 8 150 50 11 12 20 0 1 0 77 13\n";
        fs::write(task.join("stat"), stat).unwrap();
        let per_second = rustix::param::clock_ticks_per_second();
        let expected = Duration::from_secs_f64(200.0 / per_second as f64);
        assert_eq!(thread_time_in(root.path(), "lane").unwrap(), expected);
        fs::write(task.join("schedstat"), "0 0 0\n").unwrap();
        assert_eq!(thread_time_in(root.path(), "lane").unwrap(), expected);
        fs::write(task.join("schedstat"), "123456789 5 6\n").unwrap();
        let exact = Duration::from_nanos(123_456_789);
        assert_eq!(thread_time_in(root.path(), "lane").unwrap(), exact);
        fs::write(task.join("schedstat"), "many\n").unwrap();
        let error = thread_time_in(root.path(), "lane").unwrap_err();
        assert!(matches!(error, Error::Malformed { .. }), "{error}");
    }

    #[test]
    fn a_thread_started_by_a_pinned_one_gets_its_processors_back() {
        let counts = thread::spawn(|| {
            let all = reset_affinity().unwrap();
            let allowed = rustix::thread::sched_getaffinity(None).unwrap();
            let first = (0..CpuSet::MAX_CPU)
                .find(|cpu| allowed.is_set(*cpu))
                .unwrap();
            let mut one = CpuSet::new();
            one.set(first);
            rustix::thread::sched_setaffinity(None, &one).unwrap();
            let inherited =
                thread::spawn(|| (affinity_count().unwrap(), reset_affinity().unwrap()));
            (all, inherited.join().unwrap())
        });
        let (all, (inherited, reset)) = counts.join().unwrap();
        assert_eq!((inherited, reset), (1, all));
    }
}
