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

/// Inspect and manage kvdepot's storage, serve the storage to other processes, and measure this
/// machine.
#[derive(Parser)]
#[command(
    name = "kvdepot",
    version,
    after_help = "Terms: a depot is the list of storage tiers that a process has opened; an arena \
                  is a file or device in which the tier Dax or Nvme stores blocks.\n\
                  Exit status: 0 success, 1 problems found, 2 usage errors and failures.\n\
                  Set KVDEPOT_LOG to off, error, warn, info, debug or trace for the log level \
                  (stderr)."
)]
pub(crate) struct Args {
    /// Print JSON Lines (one object per line) instead of a table.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// List the namespaces (sets of blocks) of an arena or of a running depot; without PATH, list
    /// this user's running depots.
    ///
    /// The command also works while another process owns the arena. If PATH is `unix:SOCKET`, the
    /// command requests the list from the server of the depot. Without PATH and without options,
    /// the command lists the user's running depots (depots with a process that listens on a
    /// socket). The command finds all sockets in the runtime directory, and other sockets of the
    /// user with kvdepot in the file name.
    #[command(mut_arg("path", |path| path.help(targets::or_running(targets::READ))))]
    Ls(Ls),
    /// Show size, usage, owner process and age of an arena, or the counters of a running depot.
    ///
    /// The command also works while another process owns the arena. If PATH is `unix:SOCKET`, the
    /// command requests the counters from the server of the depot.
    #[command(mut_arg("path", |path| path.help(targets::or_default(targets::READ))))]
    Stat(Stat),
    /// Read and verify all blocks, and list the corrupt blocks; exit status 1 if any block or the
    /// arena is corrupt.
    ///
    /// The command also works while another process owns the arena, and skips blocks that the owner
    /// replaces during the check. After Ctrl-C, the command prints the results so far and ends. If
    /// the file of a corrupt Posix block has one checksum per MiB, the command also prints the
    /// corrupt MiB of the payload.
    #[command(mut_arg("path", |path| path.help(targets::or_default(targets::VERIFY))))]
    Verify(Verify),
    /// Remove blocks, an arena, or all default arenas and unused files of kvdepot.
    ///
    /// With --namespace or --key, the command removes blocks and keeps the arena. If another
    /// process owns the arena, the command requests the removal through the owner's socket; if the
    /// owner has no socket, the command fails. The owner, or the server at `unix:SOCKET`, removes
    /// the blocks from all tiers of the depot.
    ///
    /// Without --namespace and --key, the command deletes the arena at PATH, or the default arena
    /// of --instance, after a confirmation. If the arena is a file, the command deletes the file;
    /// if the arena is a DAX or block device, the command erases the
    /// device's header. If another process
    /// owns the arena, the command prints the owner and keeps the arena.
    ///
    /// To delete a directory of the tier Posix, close all processes that use the directory and run
    /// `rm -r`.
    #[command(mut_arg("path", |path| path.help(targets::or_default_blocks(targets::RM))))]
    Rm(Rm),
    /// Serve a depot (storage tiers) to the processes of this host until Ctrl-C or SIGTERM.
    ///
    /// The server opens the tiers and keeps the index of the blocks. Clients in other processes
    /// open the depot with `kvdepot.open("unix:PATH")`, and copy their own bytes. If a client
    /// process ends, the server releases the client's pins (blocks protected from eviction) and
    /// reservations (space of unfinished blocks). While
    /// no server is running, lookups of the clients are misses; after a restart of the server,
    /// lookups hit again.
    ///
    /// On SIGHUP, the server reads the token and TLS files of the tier Peer again. If stdin is a
    /// terminal, SIGHUP ends the server.
    Serve(Serve),
    /// Manage sessions: stored conversations of local engines, such as llama.cpp.
    Session(Session),
    /// Manage quarantined namespaces: sets of blocks that this user's engines do not use.
    ///
    /// To detect wrong blocks, vLLM's connector computes some stored blocks again and compares the
    /// results with the stored blocks. After three failed comparisons, the connector quarantines
    /// the namespace, also for later starts. The cause is a setting, a file or a patch that changes
    /// keys and values and is not part of the namespace.
    Quarantine(Quarantine),
    /// Check this machine: supported features, possible improvements, and problems.
    ///
    /// A `warn` line reports damage, or a problem that prevents kvdepot from working or storing.
    /// With a `warn` line, the exit status is 1. An `advice` line reports a possible improvement,
    /// or leftover files, and leaves the exit status unchanged.
    Doctor(DoctorArgs),
    /// Measure kvdepot on this machine, and print the ratio to a limit, such as the fastest plain
    /// copy.
    ///
    /// The column `limit is` names the limit of each row.
    #[command(subcommand)]
    Bench(Bench),
}

/// Options of `serve`.
#[derive(clap::Args)]
pub(crate) struct Serve {
    /// Storage tiers of the depot, first to last, such as "Cache|Dax" [default: the pipeline in the
    /// --config file, otherwise "Cache|Dax"].
    #[arg(value_name = "PIPELINE")]
    pub(crate) pipeline: Option<String>,
    /// YAML or JSON file with options of the depot (docs/configuration.md).
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Option of the depot, such as dax.path=/dev/dax0.0 or cache.capacity=8GiB; repeatable. The
    /// option overrides the --config file.
    #[arg(short = 'o', long = "option", value_name = "NAME=VALUE")]
    pub(crate) options: Vec<String>,
    /// Path of the socket on which the server listens [default: kvdepot.sock in the runtime
    /// directory, or kvdepot-INSTANCE.sock if the option `instance` is set].
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// Address of the HTTP server for metrics and health checks: a loopback address with a port,
    /// such as 127.0.0.1:9410 (port 0: a free port), or unix: and the path of a socket [default:
    /// the option `http`, otherwise no HTTP server].
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) http: Option<String>,
}

/// Which arena.
#[derive(clap::Args)]
pub(crate) struct ArenaArgs {
    // Its help is the command's (`targets`).
    pub(crate) path: Option<PathBuf>,
    /// Name of an instance (a depot with the option `instance`). The command uses the default arena
    /// of the instance instead of PATH.
    #[arg(long, value_name = "NAME", conflicts_with = "path")]
    pub(crate) instance: Option<String>,
}

/// What `doctor` looks at besides the machine.
#[derive(clap::Args)]
pub(crate) struct DoctorArgs {
    /// Path to test for direct I/O (O_DIRECT), for example the planned nvme.path or posix.path. The
    /// path need not exist.
    pub(crate) path: Option<PathBuf>,
    /// Measure the copy kernels (memory-copy routines) of this machine again, print their speeds,
    /// and store the result in the cache directory. The measurement takes some 100 ms; other
    /// programs should be idle.
    #[arg(long)]
    pub(crate) calibrate: bool,
}

/// Options of `ls`.
#[derive(clap::Args)]
pub(crate) struct Ls {
    #[command(flatten)]
    pub(crate) arena: ArenaArgs,
    /// List only namespaces whose digest (ID) starts with these hexadecimal digits; with --blocks,
    /// list only their blocks [default: all namespaces].
    #[arg(long, value_name = "DIGEST", value_parser = hexadecimal)]
    pub(crate) namespace: Option<String>,
    /// List all blocks instead of namespaces, for an arena with the newest block first.
    #[arg(long)]
    pub(crate) blocks: bool,
    /// Maximum number of lines to print [default: all].
    #[arg(long, value_name = "COUNT")]
    pub(crate) limit: Option<usize>,
    /// List only blocks of an arena with a lower sequence number than this number, for example to
    /// continue a list that --limit has cut off.
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
    /// Print the counters of a running depot in the Prometheus text format, instead of a table.
    #[arg(long)]
    pub(crate) metrics: bool,
}

/// Options of `verify`.
#[derive(clap::Args)]
pub(crate) struct Verify {
    #[command(flatten)]
    pub(crate) arena: ArenaArgs,
    /// Number of threads that read and hash blocks, 1 to 256 [default: the number of the process's
    /// CPUs, at most 8].
    #[arg(long, value_name = "COUNT", value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// File with MAC keys (message authentication codes), in the format of the option
    /// `mac_key_file`. The command reports a block without a MAC by one of these keys as corrupt.
    /// For block files of the tier Posix only.
    #[arg(long, value_name = "FILE")]
    pub(crate) mac_key_file: Option<PathBuf>,
}

/// Options of `rm`.
#[derive(clap::Args)]
pub(crate) struct Rm {
    #[command(flatten)]
    pub(crate) arena: ArenaArgs,
    /// Namespace of the blocks to remove: a unique prefix of the namespace's digest (ID), in
    /// hexadecimal digits.
    #[arg(long, value_name = "DIGEST", value_parser = hexadecimal)]
    pub(crate) namespace: Option<String>,
    /// Key of a block to remove, 64 hexadecimal digits; repeatable. Without --namespace, the
    /// command removes the block from all namespaces.
    #[arg(long = "key", value_name = "KEY", value_parser = key)]
    pub(crate) keys: Vec<Key>,
    /// Remove the default arenas of all instances, unfinished arenas, sockets without a listening
    /// process, files with measured copy kernels, and leftover files of benchmarks.
    #[arg(long, conflicts_with_all = ["path", "instance", "namespace", "keys"])]
    pub(crate) all: bool,
    /// Delete an arena without asking for confirmation; required if stdin is not a terminal. The
    /// removal of blocks needs no confirmation.
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
