//! The `kvdepot` command: what is in an arena, whether it is sound, and how fast this machine
//! moves blocks.
//!
//! Data goes to stdout, everything else to stderr. The exit status is 0 when all is well, 1 when
//! a command found problems, and 2 for usage and errors.

#![forbid(unsafe_code)]

mod args;
mod bench;
mod cmd;
mod error;
mod interrupt;
mod leftovers;
mod output;
mod status;

use std::ffi::{OsStr, OsString};
use std::io::{ErrorKind, Write};

use args::{Args, Command, targets};
use clap::{CommandFactory, Parser};
use error::Error;
use kvdepot_store::config::ucm::log_level;
use output::Output;
use status::{FAILED, OK};
use tracing_subscriber::filter::LevelFilter;

/// Runs the command with these arguments, the first of which is the program's name, and returns
/// the exit status.
pub fn main(args: impl IntoIterator<Item = OsString>) -> i32 {
    kvdepot_transfer::install();
    let args: Vec<OsString> = args.into_iter().collect();
    let program = args.first().cloned().unwrap_or_default();
    let args = match Args::try_parse_from(args) {
        Ok(args) => args,
        Err(error) => {
            // To stdout when help was asked for; where neither can be written there is nobody.
            let _written = error.print();
            return if error.use_stderr() { FAILED } else { OK };
        }
    };
    let mut output = Output::new(args.json);
    let allowed = allowed(&args.command);
    let result = log(usual_level(&args.command))
        .and_then(|()| run(args.command, &program, &mut output))
        .and_then(|status| {
            output.flush()?;
            Ok(status)
        });
    match result {
        Ok(status) => status,
        // The reader of stdout, such as `head`, has closed it.
        Err(Error::Output(error)) if error.kind() == ErrorKind::BrokenPipe => OK,
        Err(error) => {
            let mut stderr = std::io::stderr().lock();
            let _written = writeln!(stderr, "error: {error}");
            if let Some(hint) = error.hint() {
                let _written = writeln!(stderr, "hint: {hint}");
            }
            if let Some(allowed) = allowed.filter(|_| error.is_about_target()) {
                let _written = writeln!(stderr, "allowed: {allowed}");
            }
            FAILED
        }
    }
}

/// The reference of all commands and options as a Markdown page, from the declarations that parse
/// them.
#[must_use]
pub fn reference() -> String {
    args::reference(Args::command())
}

fn run(command: Command, program: &OsStr, output: &mut Output) -> Result<i32, Error> {
    match command {
        Command::Ls(args) => cmd::ls::run(&args, output),
        Command::Stat(args) => cmd::stat::run(&args, output),
        Command::Verify(args) => cmd::verify::run(&args, output),
        Command::Rm(args) => cmd::rm::run(&args, output),
        Command::Serve(args) => cmd::serve::run(&args, output),
        Command::Session(args) => cmd::session::run(&args, output),
        Command::Quarantine(args) => cmd::quarantine::run(args.command, output),
        Command::Doctor(args) => cmd::doctor::run(&args, output),
        Command::Bench(args) => bench::run(&args, program, output),
    }
}

/// Returns the kinds of PATH or DEPOT that the command takes.
fn allowed(command: &Command) -> Option<&'static str> {
    match command {
        Command::Ls(_) | Command::Stat(_) => Some(targets::READ),
        Command::Verify(_) => Some(targets::VERIFY),
        Command::Rm(_) => Some(targets::RM),
        Command::Session(_) => Some(targets::DEPOT),
        Command::Doctor(_) => Some(targets::DOCTOR),
        Command::Serve(_) | Command::Quarantine(_) | Command::Bench(_) => None,
    }
}

/// Returns the log level if `KVDEPOT_LOG` is not set.
fn usual_level(command: &Command) -> LevelFilter {
    match command {
        // Their arenas are in memory, and gone with them.
        Command::Bench(_) => LevelFilter::ERROR,
        _ => LevelFilter::WARN,
    }
}

/// Logs go to stderr from the level that `KVDEPOT_LOG` names, or from `usual`. A process that has
/// its own subscriber keeps it.
fn log(usual: LevelFilter) -> Result<(), Error> {
    let given = std::env::var("KVDEPOT_LOG");
    let given = given.unwrap_or_else(|_| log_level().unwrap_or_default().to_owned());
    let level = match given.trim().to_ascii_lowercase().as_str() {
        "" => usual,
        "warn" => LevelFilter::WARN,
        "off" => LevelFilter::OFF,
        "error" => LevelFilter::ERROR,
        "info" => LevelFilter::INFO,
        "debug" => LevelFilter::DEBUG,
        "trace" => LevelFilter::TRACE,
        _ => {
            return Err(Error::Usage {
                field: "KVDEPOT_LOG",
                value: format!("{given:?}"),
                allowed: "off, error, warn, info, debug or trace".into(),
            });
        }
    };
    let _kept = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init();
    Ok(())
}
