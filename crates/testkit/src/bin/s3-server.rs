//! `s3-server BUCKET COMMAND [ARGUMENT...]`: runs a command beside an object store that has this
//! bucket, and knows of it by the environment (`AWS_ENDPOINT`, `AWS_ACCESS_KEY_ID` and so on). Its
//! files are in the directory for temporary ones, and go with it.

#![forbid(unsafe_code)]
#![expect(
    clippy::unwrap_used,
    reason = "whoever measures sees why there is nothing to measure"
)]

use std::process::{Command, ExitCode};
use std::thread::available_parallelism;

use kvdepot_testkit::s3::Server;

const KEY: (&str, &str) = ("measured", "by nobody else");

fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    let (Some(bucket), Some(program)) = (words.next(), words.next()) else {
        return ExitCode::from(2);
    };
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join(bucket)).unwrap();
    let threads = available_parallelism().map_or(2, usize::from);
    let server = Server::start(root.path(), KEY, threads);
    let mut command = Command::new(program);
    command
        .args(words)
        .env("AWS_ENDPOINT", server.endpoint())
        .env("AWS_ACCESS_KEY_ID", KEY.0)
        .env("AWS_SECRET_ACCESS_KEY", KEY.1)
        .env("AWS_REGION", "us-east-1");
    let status = command.status().unwrap();
    drop(server);
    ExitCode::from(status.code().map_or(1, |code| code as u8))
}
