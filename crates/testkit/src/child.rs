//! The running test binary once more, as a process that can be killed.
//!
//! A test that needs one begins with [`role`]: in the child it answers what the child shall do,
//! with the values that the parent gave. The child reports by [`say`], the parent reads by
//! [`Child::line`]. A child ends with its parent, also when that one is killed.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

const ROLE: &str = "KVDEPOT_TESTKIT_ROLE";
const VALUE: &str = "KVDEPOT_TESTKIT_VALUE_";
/// What the parent looks for among the lines of the test harness.
const MARK: &str = "@testkit ";

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

/// Sleeps until the parent kills this process.
pub fn sleep_until_killed() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

/// A process that runs one test of this binary as a child. Killed when dropped.
#[derive(Debug)]
pub struct Child {
    process: std::process::Child,
    lines: BufReader<std::process::ChildStdout>,
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
        let lines = BufReader::new(process.stdout.take().unwrap());
        Ok(Child { process, lines })
    }

    /// The next thing it said; `None` when it has ended.
    ///
    /// # Panics
    /// When the pipe breaks.
    pub fn line(&mut self) -> Option<String> {
        let mut line = Vec::new();
        loop {
            line.clear();
            self.lines.read_until(b'\n', &mut line).unwrap();
            // A line that the kill cut off was not said.
            let text = std::str::from_utf8(line.strip_suffix(b"\n")?).unwrap();
            // The harness writes its own words in front of the first one.
            if let Some(at) = text.find(MARK) {
                return Some(text[at + MARK.len()..].to_owned());
            }
        }
    }

    /// Waits until it says this.
    ///
    /// # Panics
    /// When it ends without.
    pub fn expect(&mut self, wanted: &str) {
        loop {
            match self.line() {
                Some(line) if line == wanted => return,
                Some(_) => {}
                None => panic!("the child ended without saying {wanted:?}"),
            }
        }
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

    /// Reads lines until `count` of them begin with `word`, however slow the machine is, sleeps for
    /// `more`, kills the child, and returns all lines. A child that ends earlier ends the wait.
    ///
    /// # Panics
    /// If reading the pipe or waiting for the process fails.
    pub fn kill_after(&mut self, word: &str, count: u64, more: Duration) -> Vec<String> {
        let mut said = Vec::new();
        let mut left = count;
        while left > 0
            && let Some(line) = self.line()
        {
            left -= u64::from(line.starts_with(word));
            said.push(line);
        }
        std::thread::sleep(more);
        self.kill();
        said.extend(std::iter::from_fn(|| self.line()));
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
