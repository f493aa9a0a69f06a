//! Runs several programs at the same time, each with its output in a file.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, statvfs};
use rustix::process::{Pid, Signal, kill_process_group, umask};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::plan::Job;
use crate::report::{self, Outcome};

/// Pause between two looks at the processes.
const LOOK: Duration = Duration::from_millis(20);

/// Tests have their arenas there.
const SHM: &str = "/dev/shm";

/// Bytes that [`SHM`] needs free, as `tests/conftest.py` has it for the Python tests.
const SHM_BYTES: u64 = 256 << 20;

struct Running {
    job: Job,
    child: Child,
    begun: Instant,
    log: PathBuf,
}

/// Runs all jobs. An interrupt kills the running programs and returns an error.
pub(crate) fn run(jobs: Vec<Job>) -> io::Result<Vec<Outcome>> {
    has_memory()?;
    // Whatever the one who runs them has set.
    umask(Mode::from_raw_mode(0o022));
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    // Most tests wait more than they compute.
    let many = std::thread::available_parallelism()?.get() + 1;
    let (alone, shared): (Vec<Job>, Vec<Job>) = jobs.into_iter().partition(|job| job.alone);
    let mut outcomes = some(shared, many, &stop)?;
    outcomes.extend(some(alone, 1, &stop)?);
    Ok(outcomes)
}

fn has_memory() -> io::Result<()> {
    let shm = statvfs(SHM)?;
    let free = shm.f_bavail.saturating_mul(shm.f_frsize);
    if free >= SHM_BYTES {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "{SHM} has {} MiB free; the tests need {} MiB",
        free >> 20,
        SHM_BYTES >> 20
    )))
}

fn some(jobs: Vec<Job>, many: usize, stop: &AtomicBool) -> io::Result<Vec<Outcome>> {
    let (mut waiting, mut running, mut outcomes) = (jobs.into_iter(), Vec::new(), Vec::new());
    loop {
        while running.len() < many
            && let Some(job) = waiting.next()
        {
            running.push(Running::start(job)?);
        }
        if running.is_empty() {
            return Ok(outcomes);
        }
        if stop.load(Ordering::Relaxed) {
            running.iter().for_each(Running::kill);
            return Err(io::Error::other("interrupted"));
        }
        let mut at = 0;
        while at < running.len() {
            let one: &mut Running = &mut running[at];
            let stalls = one.begun.elapsed() > one.job.limit;
            if stalls {
                one.kill();
            }
            match one.child.try_wait()? {
                None => at += 1,
                Some(status) => {
                    let one = running.swap_remove(at);
                    let after = one.begun.elapsed();
                    let label = one.job.label.clone();
                    let outcome = Outcome::read(label, &one.log, after, status, stalls)?;
                    report::say(&outcome)?;
                    outcomes.push(outcome);
                }
            }
        }
        std::thread::sleep(LOOK);
    }
}

impl Drop for Running {
    /// No process of its group outlives the runner, or its own program.
    fn drop(&mut self) {
        self.kill();
        let _ended = self.child.wait();
    }
}

impl Running {
    fn start(mut job: Job) -> io::Result<Running> {
        let log = PathBuf::from("build/tests").join(job.label.replace(' ', "-") + ".log");
        fs::create_dir_all("build/tests")?;
        let output = File::create(&log)?;
        // One signal to the process group ends the program and its children.
        let command = job.command.process_group(0).stdin(Stdio::null());
        command.env("LC_ALL", "C.UTF-8").env("TZ", "UTC");
        let child = command.stdout(output.try_clone()?).stderr(output).spawn()?;
        let begun = Instant::now();
        Ok(Running {
            job,
            child,
            begun,
            log,
        })
    }

    fn kill(&self) {
        let _gone = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
    }
}
