//! The `kvdepot` command.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(kvdepot_cli::main(std::env::args_os()) as u8)
}
