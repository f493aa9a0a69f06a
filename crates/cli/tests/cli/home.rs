//! Runs the built command beside arenas made with the store.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, Key, Namespace, NamespaceSpec};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A directory that stands for the user's home, cache and runtime directory.
pub(crate) struct Home {
    pub(crate) dir: TempDir,
}

/// What a run of the command gave.
pub(crate) struct Ran {
    pub(crate) status: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Home {
    pub(crate) fn new() -> Home {
        let dir = tempfile::tempdir().unwrap();
        for name in ["cache", "run"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        Home { dir }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The command with this home's directories in its environment.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvdepot"));
        command
            .args(args)
            .current_dir(self.dir.path())
            .env("HOME", self.dir.path())
            .env("XDG_CACHE_HOME", self.path("cache"))
            .env("XDG_RUNTIME_DIR", self.path("run"))
            .env("TMPDIR", self.dir.path())
            .env_remove("KVDEPOT_LOG");
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Ran {
        Ran::of(self.command(args).output().unwrap())
    }

    /// Runs with `--json` and parses the lines.
    pub(crate) fn json(&self, args: &[&str]) -> (i32, Vec<Value>) {
        let mut args = args.to_vec();
        args.push("--json");
        let ran = self.run(&args);
        (ran.status, ran.rows())
    }

    /// Runs it, and interrupts it as Ctrl-C would once it catches that.
    pub(crate) fn interrupt(&self, args: &[&str]) -> Ran {
        let mut command = self.command(args);
        command.stdin(Stdio::null());
        let child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        for _ in 0..60_000 {
            if catches_signals(child.id()) {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        signal(child.id(), "-INT");
        Ran::of(child.wait_with_output().unwrap())
    }

    /// Where the default arena lies.
    pub(crate) fn default_arena(&self) -> PathBuf {
        self.path("cache/kvdepot/arena.kvd")
    }
}

impl Ran {
    pub(crate) fn of(output: Output) -> Ran {
        Ran {
            status: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    pub(crate) fn rows(&self) -> Vec<Value> {
        let parse =
            |line: &str| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        self.stdout.lines().map(parse).collect()
    }
}

/// Returns true if the command's signal handlers are installed. That of SIGTERM is the last.
pub(crate) fn catches_signals(pid: u32) -> bool {
    signals(pid, "SigCgt:") & (1 << 14) != 0
}

/// Returns one signal mask of a process, such as `SigCgt:`; 0 if the process has ended.
pub(crate) fn signals(pid: u32, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix(name));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.unwrap_or(0)
}

/// Sends a signal, such as `-INT`.
pub(crate) fn signal(pid: u32, name: &str) {
    let sent = Command::new("kill")
        .args([name, &pid.to_string()])
        .status()
        .unwrap();
    assert!(sent.success());
}

pub(crate) fn key(number: u64) -> Key {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&number.to_le_bytes());
    Key(key)
}

pub(crate) fn spec(model: &str) -> NamespaceSpec {
    NamespaceSpec {
        model: model.into(),
        dtype: "float32".into(),
        block_tokens: 16,
        ..NamespaceSpec::default()
    }
}

/// Opens an arena as its owner.
pub(crate) fn open(path: &Path, capacity: &str) -> Depot {
    let settings = json!({
        "socket": "off", "lock_wait": "0s", "dax": {"path": path, "capacity": capacity},
    });
    kvdepot_service::open(&Config::new("Dax", &settings).unwrap()).unwrap()
}

/// Puts blocks of `len` bytes.
pub(crate) fn put(ns: &Namespace, numbers: std::ops::Range<u64>, len: usize) {
    let keys: Vec<Key> = numbers.clone().map(key).collect();
    let buffers = BlockBuffers::whole(numbers.map(|n| Buffer::from_vec(payload(n, len))));
    let done = ns.put(keys, buffers).unwrap();
    let ok = done.wait(Some(Duration::from_secs(30))).unwrap();
    assert!(ok.iter().all(|ok| *ok));
}

/// Gets blocks that [`put`] has put, all of them, and compares their bytes.
pub(crate) fn get(ns: &Namespace, numbers: std::ops::Range<u64>, len: usize) {
    let keys: Vec<Key> = numbers.clone().map(key).collect();
    let empty = |_| Buffer::from_vec(vec![0; len]);
    let buffers: Vec<Buffer> = numbers.clone().map(empty).collect();
    let done = ns.get(keys, BlockBuffers::whole(buffers.clone())).unwrap();
    let ok = done.wait(Some(Duration::from_secs(30))).unwrap();
    assert!(ok.iter().all(|ok| *ok));
    for (number, buffer) in numbers.zip(buffers) {
        assert_eq!(buffer.to_vec(), payload(number, len), "block {number}");
    }
}

fn payload(number: u64, len: usize) -> Vec<u8> {
    let byte = |at| (number as usize * 31 + at * 7) as u8;
    (0..len).map(byte).collect()
}

/// An arena of 1 MiB with five blocks of model `a` and two of model `b`, closed again.
pub(crate) fn arena(path: &Path) {
    let depot = open(path, "1MiB");
    put(&depot.namespace(&spec("a")).unwrap(), 0..5, 5000);
    put(&depot.namespace(&spec("b")).unwrap(), 0..2, 300);
}

/// Flips a byte of a file.
pub(crate) fn flip(path: &Path, offset: u64) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0xFF], offset).unwrap();
}
