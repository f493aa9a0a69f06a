//! A command that is run by one of ours, which outlives it and clears up.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::low_level::pipe;

/// Signals that end this process no more. Ctrl-C is the command's, which the terminal tells itself;
/// what ends this process alone is passed on to it.
pub struct Caught {
    interrupted: Arc<AtomicBool>,
    terminated: UnixStream,
}

impl Caught {
    /// Catches these signals from now on.
    ///
    /// # Errors
    ///
    /// If a handler cannot be registered or the process has too few file descriptors.
    pub fn new() -> io::Result<Caught> {
        let interrupted = Arc::new(AtomicBool::new(false));
        flag::register(SIGINT, Arc::clone(&interrupted))?;
        let (terminated, write) = UnixStream::pair()?;
        pipe::register(SIGTERM, write)?;
        Ok(Caught {
            interrupted,
            terminated,
        })
    }

    /// Whether there was a Ctrl-C.
    pub fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    /// Runs the command to its end.
    ///
    /// # Errors
    ///
    /// If the command cannot be started or waited for.
    pub fn run(self, command: &mut Command) -> io::Result<ExitStatus> {
        let mut child = command.spawn()?;
        let pid = Pid::from_child(&child);
        let _detached = std::thread::spawn(move || pass_on(self.terminated, pid));
        child.wait()
    }
}

/// As shells say it, also of a command that a signal has ended.
pub fn code(status: ExitStatus) -> ExitCode {
    let killed = 128 + status.signal().unwrap_or_default();
    ExitCode::from(status.code().unwrap_or(killed) as u8)
}

fn pass_on(mut terminated: UnixStream, pid: Pid) {
    let mut one = [0];
    while terminated.read_exact(&mut one).is_ok() {
        // It may have ended meanwhile.
        let _ended = kill_process(pid, Signal::TERM);
    }
}
