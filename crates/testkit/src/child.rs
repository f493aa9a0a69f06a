//! The running test binary once more, as a process that can be killed.
//!
//! A test that needs one begins with [`role`]: in the child it answers what the child shall do,
//! with the values that the parent gave. The child reports by [`say`], the parent reads by
//! [`Child::line`]. A child ends with its parent, also when that one is killed.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;

const ROLE: &str = "KVDEPOT_TESTKIT_ROLE";
const VALUE: &str = "KVDEPOT_TESTKIT_VALUE_";
/// What the parent looks for among the lines of the test harness.
const MARK: &str = "@testkit ";
/// Longer than any machine stands still, and shorter than a program of tests may take.
const PATIENCE: Duration = Duration::from_secs(300);

/// What this process shall do as a child; `None` in the test itself.
#[must_use]
pub fn role() -> Option<String> {
    let role = std::env::var(ROLE).ok()?;
    // The other end of our standard input closes when the parent ends, however it ends.
    std::thread::spawn(|| {
        let mut rest = Vec::new();
        let _end = std::io::stdin().read_to_end(&mut rest);
        std::process::abort();
    });
    Some(role)
}

/// A value that the parent gave.
///
/// # Panics
/// When it gave none of that name.
#[must_use]
pub fn value(name: &str) -> String {
    std::env::var(format!("{VALUE}{name}")).unwrap()
}

/// Tells the parent. What was said before a `kill` arrives.
///
/// # Panics
/// When the parent is gone.
pub fn say(text: &str) {
    write_line(MARK, text);
}

/// In one write, past the buffer of the standard library: the line is in the pipe on return.
pub(crate) fn write_line(mark: &str, text: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("{mark}{text}\n").as_bytes()).unwrap();
    out.flush().unwrap();
}

/// Has a panic of any thread end this process. A child with several would live on without one of
/// them, and look as if nothing had happened when it is killed.
pub fn end_with_any_panic() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        hook(info);
        std::process::abort();
    }));
}

/// Sleeps until the parent kills this process.
pub fn sleep_until_killed() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

/// The standard output of a child.
#[derive(Debug)]
struct Output {
    pipe: ChildStdout,
    /// From then on reading fails.
    until: Option<Instant>,
}

impl Read for Output {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        if let Some(until) = self.until {
            let left = until.saturating_duration_since(Instant::now());
            let limit = Timespec::try_from(left).ok();
            let mut polled = [PollFd::new(&self.pipe, PollFlags::IN)];
            // Also where it goes on talking.
            if left.is_zero() || poll(&mut polled, limit.as_ref())? == 0 {
                return Err(ErrorKind::TimedOut.into());
            }
        }
        self.pipe.read(into)
    }
}

/// A process that runs one test of this binary as a child. Killed when dropped.
#[derive(Debug)]
pub struct Child {
    process: std::process::Child,
    lines: BufReader<Output>,
}

impl Child {
    /// Starts `test` (its name with its modules) of this binary in a role.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn start(test: &str, role: &str, values: &[(&str, &str)]) -> Child {
        Child::try_start(test, role, values, |_| ()).unwrap()
    }

    /// The same, after `prepare` has had the command.
    ///
    /// # Errors
    /// What the system says where it cannot be started.
    ///
    /// # Panics
    /// When this binary is not to be found.
    pub fn try_start(
        test: &str,
        role: &str,
        values: &[(&str, &str)],
        prepare: impl FnOnce(&mut Command),
    ) -> std::io::Result<Child> {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args([test, "--exact", "--nocapture", "--include-ignored"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        for (name, value) in values {
            command.env(format!("{VALUE}{name}"), value);
        }
        prepare(&mut command);
        let mut process = command.spawn()?;
        let pipe = process.stdout.take().unwrap();
        let lines = BufReader::new(Output { pipe, until: None });
        Ok(Child { process, lines })
    }

    /// The next thing it said; `None` when it has ended.
    ///
    /// # Panics
    /// When the pipe breaks.
    pub fn line(&mut self) -> Option<String> {
        self.line_until(None).unwrap()
    }

    fn line_until(&mut self, until: Option<Instant>) -> std::io::Result<Option<String>> {
        self.lines.get_mut().until = until;
        let mut line = Vec::new();
        loop {
            line.clear();
            self.lines.read_until(b'\n', &mut line)?;
            // A line that the kill cut off was not said.
            let Some(text) = line.strip_suffix(b"\n") else {
                return Ok(None);
            };
            let text = std::str::from_utf8(text).unwrap();
            // The harness writes its own words in front of the first one.
            if let Some(at) = text.find(MARK) {
                return Ok(Some(text[at + MARK.len()..].to_owned()));
            }
        }
    }

    /// Waits until it says this.
    ///
    /// # Panics
    /// If the child ends before this line, or does not write the line within minutes.
    pub fn expect(&mut self, wanted: &str) {
        self.lines_until(wanted, 1, |line| line == wanted);
    }

    /// Reads lines until so many had `word` as their first one, however slow the machine is, and
    /// returns all of them.
    ///
    /// # Panics
    /// If the child ends before these lines, or does not write them within minutes.
    pub fn wait_for(&mut self, word: &str, count: u64) -> Vec<String> {
        self.lines_until(word, count, |line| line.split(' ').next() == Some(word))
    }

    fn lines_until(
        &mut self,
        wanted: &str,
        count: u64,
        is_it: impl Fn(&str) -> bool,
    ) -> Vec<String> {
        let until = Instant::now() + PATIENCE;
        let (mut said, mut left) = (Vec::new(), count);
        while left > 0 {
            let line = match self.line_until(Some(until)) {
                Ok(Some(line)) => line,
                Ok(None) => panic!(
                    "the child ended without saying {wanted:?} {left} times more: {}",
                    self.wait()
                ),
                Err(error) => panic!("no {wanted:?}, {left} times more: {error}"),
            };
            left -= u64::from(is_it(&line));
            said.push(line);
        }
        said
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Kills it with SIGKILL and waits for its end.
    ///
    /// # Panics
    /// When it cannot be waited for.
    pub fn kill(&mut self) -> ExitStatus {
        // It may have ended by itself.
        let _killed = self.process.kill();
        self.process.wait().unwrap()
    }

    /// Kills the child, and returns the lines that were not read yet.
    ///
    /// # Panics
    /// If the child had already ended: it may have crashed.
    pub fn kill_and_rest(&mut self) -> Vec<String> {
        let ended = self.kill();
        let rest: Vec<String> = std::iter::from_fn(|| self.line()).collect();
        let is_killed = ended.signal() == Some(Signal::KILL.as_raw());
        assert!(is_killed, "it ended by itself: {ended}, {rest:?}");
        rest
    }

    /// [Waits](Child::wait_for) for words, sleeps for `more`, [kills](Child::kill_and_rest) it, and
    /// returns all lines.
    ///
    /// # Panics
    /// If the child ends before the kill, or does not write the lines within minutes.
    pub fn kill_after(&mut self, word: &str, count: u64, more: Duration) -> Vec<String> {
        let mut said = self.wait_for(word, count);
        std::thread::sleep(more);
        said.extend(self.kill_and_rest());
        said
    }

    /// Waits for its own end.
    ///
    /// # Panics
    /// When it cannot be waited for.
    pub fn wait(&mut self) -> ExitStatus {
        self.process.wait().unwrap()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _killed = self.process.kill();
        let _ended = self.process.wait();
    }
}
