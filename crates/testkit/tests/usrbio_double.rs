//! `usrbio-double`: a command over the double of 3FS's library, and nothing of it left behind.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

fn double(temporary: &Path, dir: &str, script: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_usrbio-double"));
    command
        .current_dir(temporary.parent().unwrap())
        .env("TMPDIR", temporary)
        .args([dir, "sh", "-c", script]);
    command
}

/// A directory with a folder for temporary files; how many are in it.
fn prepared() -> (tempfile::TempDir, impl Fn() -> usize) {
    let dir = tempfile::tempdir().unwrap();
    let temporary = dir.path().join("tmp");
    std::fs::create_dir(&temporary).unwrap();
    let left = move || std::fs::read_dir(&temporary).unwrap().count();
    (dir, left)
}

#[test]
fn a_command_finds_the_library_and_the_mount_and_its_status_is_told() {
    let (dir, left) = prepared();
    let script = r#"
        echo "$KVDEPOT_DOUBLE_3FS"
        ls "${LD_LIBRARY_PATH%%:*}"
        echo "${LD_LIBRARY_PATH#*:}"
        exit 7
    "#;
    let mut command = double(&dir.path().join("tmp"), "mount", script);
    let ran = command.env("LD_LIBRARY_PATH", "/before").output().unwrap();
    assert_eq!(ran.status.code(), Some(7));
    let mount = dir.path().join("mount").canonicalize().unwrap();
    let expected = format!("{}\nlibhf3fs_api_shared.so\n/before\n", mount.display());
    assert_eq!(String::from_utf8(ran.stdout).unwrap(), expected);
    assert_eq!(left(), 0);
}

#[test]
fn a_signal_ends_the_command_and_the_library_goes() {
    let (dir, left) = prepared();
    // Ctrl-C reaches the command from its terminal; this process alone, it ends nothing.
    let script = "trap 'echo ended; exit 3' TERM; echo begun; while :; do sleep 0.01; done";
    let mut command = double(&dir.path().join("tmp"), "mount", script);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "begun");
    assert_eq!(left(), 1);
    for signal in [Signal::INT, Signal::TERM] {
        kill_process(Pid::from_child(&child), signal).unwrap();
    }
    assert_eq!(lines.next().unwrap().unwrap(), "ended");
    assert_eq!(child.wait().unwrap().code(), Some(3));
    assert_eq!(left(), 0);
    let mut killed = double(&dir.path().join("tmp"), "mount", "kill -9 $$");
    assert_eq!(killed.status().unwrap().code(), Some(128 + 9));
    assert_eq!(left(), 0);
}

#[test]
fn what_is_missing_is_named() {
    let (dir, left) = prepared();
    let temporary = dir.path().join("tmp");
    std::fs::write(dir.path().join("file"), "").unwrap();
    let says = |command: &mut Command, status: i32, words: &str| {
        let ran = command.output().unwrap();
        let error = String::from_utf8(ran.stderr).unwrap();
        assert_eq!(ran.status.code(), Some(status), "{error}");
        assert!(error.contains(words), "{error}");
        assert_eq!(left(), 0);
    };
    let none = dir.path().join("none");
    let mut without = double(&temporary, "mount", "true");
    says(without.env("PATH", none), 1, "cc, the system's C compiler");
    says(&mut double(&temporary, "file", "true"), 1, "file: ");
    let mut no_command = Command::new(env!("CARGO_BIN_EXE_usrbio-double"));
    says(no_command.arg("mount"), 2, "usage: usrbio-double DIR");
    let args = ["mount", "no-such-command"];
    let mut unknown = Command::new(env!("CARGO_BIN_EXE_usrbio-double"));
    unknown.args(args).current_dir(dir.path());
    says(&mut unknown, 1, "no-such-command: ");
}
