//! The command line, declared once: what parses it also writes its help and its reference page.

mod alloc;
mod bench;
mod churn;
mod cluster;
mod cuda;
mod files;
mod pressure;
mod quarantine;
mod scale;
mod session;
mod sessions;
pub(crate) mod targets;
mod transfer;
mod values;

use std::path::PathBuf;

use clap::{Parser, Subcommand};
use kvdepot_store::Key;

pub(crate) use alloc::Alloc;
pub(crate) use bench::{Bench, Index, Memory, Reopen, Restore};
pub(crate) use churn::Churn;
pub(crate) use cluster::Cluster;
pub(crate) use cuda::Cuda;
pub(crate) use files::Files;
pub(crate) use pressure::Pressure;
pub(crate) use quarantine::{Quarantine, QuarantineCommand};
pub(crate) use scale::{Scale, Task};
pub(crate) use session::{InDepot, Restored, Saved, Session, SessionCommand};
pub(crate) use sessions::Sessions;
pub(crate) use transfer::Transfer;
use values::{hexadecimal, key, threads};

/// Inspect and manage kvdepot's storage, serve it to other processes, and measure this machine.
#[derive(Parser)]
#[command(
    name = "kvdepot",
    version,
    after_help = "Exit status: 0 success, 1 problems found, 2 usage errors and failures.\n\
                  Set KVDEPOT_LOG to off, error, warn, info, debug or trace for the log level \
                  (stderr)."
)]
pub(crate) struct Args {
    /// Print one JSON object per line instead of a table.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// List the namespaces of an arena or a running depot; without PATH, list running depots.
    ///
    /// The command reads an arena at PATH even while another process owns it. With `unix:SOCKET` it
    /// sends a request to the process that has the depot open. Without PATH and options it lists
    /// this user's running depots: those with a socket in the runtime directory, and those with
    /// kvdepot in the name of their socket.
    #[command(mut_arg("path", |path| path.help(targets::or_default(targets::READ))))]
    Ls(Ls),
    /// Show size, usage, owner and age of an arena, or the counters of a running depot.
    ///
    /// The command reads an arena at PATH even while another process owns it. With `unix:SOCKET` it
    /// sends a request to the process that has the depot open.
    #[command(mut_arg("path", |path| path.help(targets::or_default(targets::READ))))]
    Stat(Stat),
    /// Read and verify all blocks, and list the corrupt ones; exit status 1 if there are any.
    ///
    /// Another process may own the arena at the same time: blocks that it replaces during the check
    /// are skipped. Ctrl-C ends the check and prints the results so far. For a corrupt block of the
    /// tier Posix, the command prints which MiB of the payload are corrupt, if the header of the
    /// file has a checksum for each MiB.
    #[command(mut_arg("path", |path| path.help(targets::or_default(targets::VERIFY))))]
    Verify(Verify),
    /// Remove blocks, an arena, or all files that kvdepot has created.
    ///
    /// With --namespace or --key the command removes blocks and keeps the arena. Otherwise it
    /// deletes the arena after a confirmation: it deletes a file, and erases the header of a DAX
    /// device. Without PATH and --instance it removes only blocks of the default arena. The command
    /// does not delete an arena that another process owns; it prints the process. The owner removes
    /// the blocks of such an arena, or of `unix:SOCKET`, if it has a socket. To delete a directory
    /// of the tier Posix, close all processes that use it and run `rm -r`.
    #[command(mut_arg("path", |path| path.help(targets::or_default(targets::RM))))]
    Rm(Rm),
    /// Serve a depot to the processes of this host until Ctrl-C, SIGTERM or SIGHUP.
    ///
    /// The server owns the tiers and their index. In other processes
    /// `kvdepot.open("unix:PATH")` opens the depot; each process copies its own bytes. If a client
    /// dies, the server releases the pins and reservations of that client. While the server is
    /// down, lookups of its clients miss; they hit again after a restart.
    Serve(Serve),
    /// Manage the stored conversations (sessions) of local engines.
    Session(Session),
    /// Manage quarantined namespaces, which this user's engines do not use.
    ///
    /// vLLM's connector recomputes some of the stored blocks and compares them. If too many differ,
    /// the connector quarantines their namespace, also for later starts. The cause is a setting, a
    /// file or a patch that changes keys and values and is not part of the namespace.
    Quarantine(Quarantine),
    /// Check this machine: supported features, possible improvements, and problems.
    ///
    /// A `warn` line reports a problem that prevents kvdepot from working or storing, or damage;
    /// the exit status is then 1. An `advice` line reports a possible improvement or leftover
    /// files.
    Doctor(DoctorArgs),
    /// Measure this machine's limit, kvdepot's speed, and their ratio.
    #[command(subcommand)]
    Bench(Bench),
}

/// Options of `serve`.
#[derive(clap::Args)]
pub(crate) struct Serve {
    /// Pipeline of tiers, first to last, such as "Cache|Dax" [default: that of --config, or
    /// "Cache|Dax"].
    #[arg(value_name = "PIPELINE")]
    pub(crate) pipeline: Option<String>,
    /// YAML or JSON file with options (docs/configuration.md).
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// One option, such as dax.path=/dev/dax0.0 or cache.capacity=8GiB; overrides --config;
    /// repeatable.
    #[arg(short = 'o', long = "option", value_name = "NAME=VALUE")]
    pub(crate) options: Vec<String>,
    /// Socket to listen on [default: kvdepot.sock in the runtime directory, with an instance
    /// kvdepot-INSTANCE.sock].
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
}

/// Which arena.
#[derive(clap::Args)]
pub(crate) struct ArenaArgs {
    // Its help is the command's (`targets`).
    pub(crate) path: Option<PathBuf>,
    /// Use the default arena of this instance.
    #[arg(long, value_name = "NAME", conflicts_with = "path")]
    pub(crate) instance: Option<String>,
}

/// What `doctor` looks at besides the machine.
#[derive(clap::Args)]
pub(crate) struct DoctorArgs {
    /// Directory to test for direct I/O, for example the future nvme.path or posix.path.
    pub(crate) path: Option<PathBuf>,
}

/// Options of `ls`.
#[derive(clap::Args)]
pub(crate) struct Ls {
    #[command(flatten)]
    pub(crate) arena: ArenaArgs,
    /// Only namespaces whose digest starts with these hexadecimal digits.
    #[arg(long, value_name = "DIGEST", value_parser = hexadecimal)]
    pub(crate) namespace: Option<String>,
    /// List all blocks; those of an arena newest first.
    #[arg(long)]
    pub(crate) blocks: bool,
    /// Print at most COUNT lines.
    #[arg(long, value_name = "COUNT")]
    pub(crate) limit: Option<usize>,
    /// Arena only: continue a listing that --limit cut off, before this sequence number.
    #[arg(long, value_name = "SEQUENCE")]
    pub(crate) before: Option<u64>,
}

impl Ls {
    /// Whether neither an arena nor anything of one is asked for.
    pub(crate) fn names_nothing(&self) -> bool {
        let arena = self.arena.path.is_some() || self.arena.instance.is_some();
        let part = self.namespace.is_some() || self.limit.is_some() || self.before.is_some();
        !(arena || part || self.blocks)
    }
}

/// Options of `stat`.
#[derive(clap::Args)]
pub(crate) struct Stat {
    #[command(flatten)]
    pub(crate) arena: ArenaArgs,
    /// Print the counters of a running depot in the Prometheus text format.
    #[arg(long)]
    pub(crate) metrics: bool,
}

/// Options of `verify`.
#[derive(clap::Args)]
pub(crate) struct Verify {
    #[command(flatten)]
    pub(crate) arena: ArenaArgs,
    /// Number of threads that read and hash [default: the process's CPUs, at most 8].
    #[arg(long, value_name = "COUNT", value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// MAC key file (as the option `mac_key_file`); every block must match one of its keys. Posix
    /// block files only.
    #[arg(long, value_name = "FILE")]
    pub(crate) mac_key_file: Option<PathBuf>,
}

/// Options of `rm`.
#[derive(clap::Args)]
pub(crate) struct Rm {
    #[command(flatten)]
    pub(crate) arena: ArenaArgs,
    /// Remove the blocks of the namespace whose digest starts with these hexadecimal digits.
    #[arg(long, value_name = "DIGEST", value_parser = hexadecimal)]
    pub(crate) namespace: Option<String>,
    /// Remove the block with this key (64 hexadecimal digits), in all namespaces or in --namespace;
    /// repeatable.
    #[arg(long = "key", value_name = "KEY", value_parser = key)]
    pub(crate) keys: Vec<Key>,
    /// Remove all default arenas, stale sockets, and leftover files of benchmarks.
    #[arg(long, conflicts_with_all = ["path", "instance", "namespace", "keys"])]
    pub(crate) all: bool,
    /// Do not ask for confirmation; required when there is no terminal, except for blocks.
    #[arg(long)]
    pub(crate) yes: bool,
}

/// The reference of all commands as Markdown.
pub(crate) fn reference(mut command: clap::Command) -> String {
    command.build();
    let mut page = format!(
        "# Command line\n\n<!-- Generated from crates/cli/src/args.rs: make docs -->\n\n\
         ```text\n{}```\n",
        command.render_long_help()
    );
    describe(&mut command, "kvdepot", &mut page);
    page
}

fn describe(command: &mut clap::Command, above: &str, page: &mut String) {
    for inner in command.get_subcommands_mut() {
        if inner.is_hide_set() || inner.get_name() == "help" {
            continue;
        }
        let name = format!("{above} {}", inner.get_name());
        let help = inner.render_long_help();
        page.push_str(&format!("\n## `{name}`\n\n```text\n{help}```\n"));
        describe(inner, &name, page);
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_declarations_are_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn the_reference_has_every_command() {
        let page = reference(Args::command());
        for name in [
            "kvdepot ls",
            "kvdepot rm",
            "kvdepot doctor",
            "kvdepot bench memory",
            "kvdepot bench restore",
        ] {
            assert!(page.contains(&format!("## `{name}`")), "{name}");
        }
    }
}
