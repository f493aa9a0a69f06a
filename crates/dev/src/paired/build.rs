//! The two commands that are compared: one of a commit, kept below `build/`, one of the tree.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// How often a signal is looked for while a program runs.
const LOOK: Duration = Duration::from_millis(20);
/// A terminal's Ctrl-C reaches the program too, which then takes its files away; it is told again
/// only when it has not ended for so long, and would not take a second one for a hint.
const PATIENCE: Duration = Duration::from_secs(5);

/// Ctrl-C ends the program that runs, and then this one, which takes its folders away.
#[derive(Debug)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Catches signals from now on.
    ///
    /// # Errors
    /// The system refuses.
    pub fn catch() -> io::Result<Interrupt> {
        let came = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&came))?;
        }
        Ok(Interrupt(came))
    }

    /// Runs a program to its end; what it writes to standard output goes to the file where there
    /// is one.
    ///
    /// # Errors
    /// It cannot be started, it fails, or a signal came.
    pub fn run(&self, command: &mut Command, output: Option<&Path>) -> io::Result<()> {
        command.stdin(Stdio::null());
        if let Some(path) = output {
            command.stdout(fs::File::create(path)?);
        }
        let name = command.get_program().to_string_lossy().into_owned();
        let error = |error: io::Error| io::Error::new(error.kind(), format!("{name}: {error}"));
        let mut child = command.spawn().map_err(error)?;
        let mut patience = PATIENCE;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            sleep(LOOK);
            if self.0.load(Ordering::Relaxed) {
                patience = patience.saturating_sub(LOOK);
            }
            if patience.is_zero() {
                let mut kill = Command::new("kill");
                let _status = kill.arg(child.id().to_string()).status();
                patience = PATIENCE;
            }
        };
        if self.0.load(Ordering::Relaxed) {
            return Err(io::Error::other("interrupted"));
        }
        match status.success() {
            true => Ok(()),
            false => Err(io::Error::other(format!("{name}: {status}"))),
        }
    }
}

/// A commit's tree, which goes with this value.
struct Worktree<'a> {
    root: &'a Path,
    path: PathBuf,
}

impl Drop for Worktree<'_> {
    fn drop(&mut self) {
        let mut git = git(self.root);
        let _status = git
            .args(["worktree", "remove", "--force"])
            .arg(&self.path)
            .status();
    }
}

fn git(root: &Path) -> Command {
    let mut git = Command::new("git");
    git.current_dir(root);
    git
}

/// The commit that a name stands for.
fn commit(root: &Path, name: &str) -> io::Result<String> {
    let name = format!("{name}^{{commit}}");
    let answer = git(root)
        .args(["rev-parse", "--verify", "--quiet", &name])
        .output()?;
    let commit = String::from_utf8_lossy(&answer.stdout).trim().to_owned();
    match answer.status.success() {
        true => Ok(commit),
        false => Err(io::Error::other(format!(
            "{name}: git knows no such commit"
        ))),
    }
}

/// Cargo for the command in a tree. No object of `target` that it writes has another tree's path.
fn cargo(tree: &Path, target: &Path) -> Command {
    let mut cargo = Command::new("cargo");
    cargo
        .current_dir(tree)
        .args(["build", "--release", "--quiet", "-p", "kvdepot-cli"]);
    cargo.env("CARGO_TARGET_DIR", target);
    cargo
}

/// The command of a commit: built once, then kept by its name.
///
/// # Errors
/// No such commit, a build that fails, a signal.
pub fn of_commit(root: &Path, name: &str, interrupt: &Interrupt) -> io::Result<PathBuf> {
    let commit = commit(root, name)?;
    let folder = root.join("build/paired");
    let kept = folder.join(&commit).with_extension("kvdepot");
    if kept.exists() {
        return Ok(kept);
    }
    fs::create_dir_all(&folder)?;
    let tree = Worktree {
        root,
        path: folder.join(format!("tree-{commit}")),
    };
    // One that a kill has left behind is in the way.
    let _status = git(root).args(["worktree", "prune"]).status();
    let mut add = git(root);
    add.args(["worktree", "add", "--quiet", "--force", "--detach"]);
    interrupt.run(add.arg(&tree.path).arg(&commit), None)?;
    let target = folder.join("target");
    interrupt.run(&mut cargo(&tree.path, &target), None)?;
    keep(&target, &kept)?;
    Ok(kept)
}

/// The command of the tree as it is, aside from where the next build writes.
///
/// # Errors
/// A build that fails, a signal.
pub fn of_tree(root: &Path, interrupt: &Interrupt) -> io::Result<PathBuf> {
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    let target = root.join(target);
    interrupt.run(&mut cargo(root, &target), None)?;
    let kept = root.join("build/paired/tree.kvdepot");
    fs::create_dir_all(root.join("build/paired"))?;
    keep(&target, &kept)?;
    Ok(kept)
}

/// Whole or not there.
fn keep(target: &Path, kept: &Path) -> io::Result<()> {
    let begun = kept.with_extension("new");
    fs::copy(target.join("release/kvdepot"), &begun)?;
    fs::rename(&begun, kept)
}
