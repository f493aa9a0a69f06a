//! `usrbio-double DIR COMMAND [ARGUMENT...]`: runs a command for which a directory is a mounted
//! 3FS, over the double of its library (`usrbio/double.c`), which it finds under the library's own
//! name. The status is the command's. The double is built in a folder of its own, which goes at the
//! end; the directory stays, and is made where there is none.

#![forbid(unsafe_code)]
#![expect(
    clippy::print_stderr,
    reason = "whoever starts it sees why there is nothing to run"
)]

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvdepot_testkit::double;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::low_level::pipe;

const USAGE: &str = "usage: usrbio-double DIR COMMAND [ARGUMENT...]";

/// As 3FS builds it, and `ds3fs.library` names it.
const LIBRARY: &str = "libhf3fs_api_shared.so";

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let [dir, program, more @ ..] = words.as_slice() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match run(dir.as_ref(), Command::new(program).args(more)) {
        Ok(status) => {
            // As shells say it of a command that a signal has ended.
            let killed = 128 + status.signal().unwrap_or_default();
            ExitCode::from(status.code().unwrap_or(killed) as u8)
        }
        Err(error) => {
            eprintln!("usrbio-double: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(dir: &Path, command: &mut Command) -> Result<ExitStatus, String> {
    let told = |what: String| move |error: io::Error| format!("{what}: {error}");
    let (interrupted, terminated) = caught().map_err(told("signals".into()))?;
    let named = dir.display().to_string();
    let made = std::fs::create_dir_all(dir).and_then(|()| dir.canonicalize());
    let mount = made.map_err(told(named))?;
    let folder = tempfile::tempdir().map_err(told("a temporary folder".into()))?;
    double::build_as("usrbio", &folder.path().join(LIBRARY))?;
    let mut found = folder.path().as_os_str().to_owned();
    if let Some(more) = std::env::var_os("LD_LIBRARY_PATH") {
        found.push(":");
        found.push(more);
    }
    if interrupted.load(Ordering::Relaxed) {
        return Err("interrupted".into());
    }
    let name = command.get_program().display().to_string();
    let command = command
        .env("KVDEPOT_DOUBLE_3FS", mount)
        .env("LD_LIBRARY_PATH", found);
    let mut child = command.spawn().map_err(told(name.clone()))?;
    let pid = Pid::from_child(&child);
    let _detached = std::thread::spawn(move || pass_on(terminated, pid));
    child.wait().map_err(told(name))
}

/// Ctrl-C is the command's, which the terminal tells itself; what ends this process alone can be
/// read from the socket. So the folder goes in each case.
fn caught() -> io::Result<(Arc<AtomicBool>, UnixStream)> {
    let interrupted = Arc::new(AtomicBool::new(false));
    flag::register(SIGINT, Arc::clone(&interrupted))?;
    let (terminated, write) = UnixStream::pair()?;
    pipe::register(SIGTERM, write)?;
    Ok((interrupted, terminated))
}

fn pass_on(mut terminated: UnixStream, pid: Pid) {
    let mut one = [0];
    while terminated.read_exact(&mut one).is_ok() {
        // It may have ended meanwhile.
        let _ended = kill_process(pid, Signal::TERM);
    }
}
