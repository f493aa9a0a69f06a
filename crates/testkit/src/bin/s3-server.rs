//! `s3-server BUCKET COMMAND [ARGUMENT...]`: runs a command beside an object store that has this
//! bucket, and knows of it by the environment (`AWS_ENDPOINT`, `AWS_ACCESS_KEY_ID` and so on). Its
//! files are in the directory for temporary ones, and go with it. The status is the command's.

#![forbid(unsafe_code)]
#![expect(
    clippy::print_stderr,
    reason = "whoever starts it sees why there is nothing to run"
)]

use std::ffi::{OsStr, OsString};
use std::io;
use std::process::{Command, ExitCode, ExitStatus};
use std::thread::available_parallelism;

use kvdepot_testkit::command::{Caught, code};
use kvdepot_testkit::s3::Server;

const USAGE: &str = "usage: s3-server BUCKET COMMAND [ARGUMENT...]";

const KEY: (&str, &str) = ("measured", "by nobody else");

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let [bucket, program, more @ ..] = words.as_slice() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match run(bucket, Command::new(program).args(more)) {
        Ok(status) => code(status),
        Err(error) => {
            eprintln!("s3-server: {}: {error}", program.display());
            ExitCode::FAILURE
        }
    }
}

fn run(bucket: &OsStr, command: &mut Command) -> io::Result<ExitStatus> {
    let caught = Caught::new()?;
    let root = tempfile::tempdir()?;
    std::fs::create_dir(root.path().join(bucket))?;
    let threads = available_parallelism().map_or(2, usize::from);
    let server = Server::start(root.path(), KEY, threads);
    let command = command
        .env("AWS_ENDPOINT", server.endpoint())
        .env("AWS_ACCESS_KEY_ID", KEY.0)
        .env("AWS_SECRET_ACCESS_KEY", KEY.1)
        .env("AWS_REGION", "us-east-1");
    let status = caught.run(command);
    drop(server);
    status
}
