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
use std::io;
use std::path::Path;
use std::process::{Command, ExitCode, ExitStatus};

use kvdepot_testkit::command::{Caught, code};
use kvdepot_testkit::double;

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
        Ok(status) => code(status),
        Err(error) => {
            eprintln!("usrbio-double: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(dir: &Path, command: &mut Command) -> Result<ExitStatus, String> {
    let told = |what: String| move |error: io::Error| format!("{what}: {error}");
    let caught = Caught::new().map_err(told("signals".into()))?;
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
    if caught.is_interrupted() {
        return Err("interrupted".into());
    }
    let name = command.get_program().display().to_string();
    let command = command
        .env("KVDEPOT_DOUBLE_3FS", mount)
        .env("LD_LIBRARY_PATH", found);
    caught.run(command).map_err(told(name))
}
