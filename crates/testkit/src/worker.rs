//! The running test binary once more, as a process that does what it is told, a line at a time.
//!
//! Where a [`child`](crate::child) plays one scene, a worker is asked again and again: the parent
//! [tells](Worker::tell), may stop, continue or kill it before it has [answered](Worker::answer),
//! and waits for no answer for ever. A worker ends with its parent.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use crate::child::write_line;

const ROLE: &str = "KVDEPOT_TESTKIT_WORKER";
/// What an answer begins with.
const MARK: &str = "@worker ";

/// What this process shall be, and the commands that come for it; `None` in the test itself.
///
/// # Panics
/// When no thread can be started.
#[must_use]
pub fn role() -> Option<(String, Receiver<String>)> {
    let role = std::env::var(ROLE).ok()?;
    let (to, commands) = channel();
    let read = move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if to.send(line).is_err() {
                break;
            }
        }
        #[expect(clippy::exit, reason = "its parent has ended, whatever it is doing")]
        std::process::exit(0);
    };
    std::thread::Builder::new().spawn(read).unwrap();
    Some((role, commands))
}

/// Answers a command, in one line.
///
/// # Panics
/// When the parent is gone.
pub fn answer(text: &str) {
    write_line(MARK, text);
}

/// Such a process. Killed when dropped.
#[derive(Debug)]
pub struct Worker {
    process: std::process::Child,
    answers: Receiver<String>,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a plain value of a test")]
pub enum Silence {
    /// The process has ended.
    Ended,
    /// The time is over.
    Late,
}

impl Worker {
    /// Starts one in a role, which may have words behind it.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn start(role: &str) -> Worker {
        Worker::start_with(role, &[])
    }

    /// The same, with variables in its environment.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn start_with(role: &str, variables: &[(String, String)]) -> Worker {
        let variables = variables.iter().map(|(name, value)| (name, value));
        let mut process = Command::new(std::env::current_exe().unwrap())
            .env(ROLE, role)
            .envs(variables)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let (to, answers) = channel();
        let read = move || {
            for line in lines.map_while(Result::ok) {
                let text = line.strip_prefix(MARK).map(str::to_owned);
                if text.is_some_and(|text| to.send(text).is_err()) {
                    break;
                }
            }
        };
        std::thread::Builder::new().spawn(read).unwrap();
        Worker { process, answers }
    }

    /// Sends a command. Nothing happens when it has ended.
    pub fn tell(&mut self, command: &str) {
        if let Some(input) = &mut self.process.stdin {
            let _gone = input.write_all(format!("{command}\n").as_bytes());
        }
    }

    /// Its next answer, within `limit`.
    ///
    /// # Errors
    /// Why there is none.
    pub fn answer(&mut self, limit: Duration) -> Result<String, Silence> {
        self.answers
            .recv_timeout(limit)
            .map_err(|error| match error {
                RecvTimeoutError::Timeout => Silence::Late,
                RecvTimeoutError::Disconnected => Silence::Ended,
            })
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Kills it with SIGKILL and waits for its end.
    pub fn kill(&mut self) {
        // It may have ended by itself.
        let _killed = self.process.kill();
        let _ended = self.process.wait();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
    }
}
