//! A test of this binary in a child that has a user and a mount namespace of its own: it mounts
//! what it likes, and nobody else sees it. Most systems let any user have that.

#![allow(
    dead_code,
    clippy::allow_attributes,
    clippy::print_stdout,
    reason = "each test binary uses its own part of this, and says why it is skipped"
)]
#![expect(
    unsafe_code,
    reason = "no safe call makes a namespace, mounts, or filters calls"
)]

use std::ffi::CString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use kvdepot_testkit::child::{self, Child};

/// What is mounted before the child begins.
#[derive(Clone)]
pub(crate) struct Mount {
    pub(crate) kind: &'static str,
    pub(crate) at: PathBuf,
    pub(crate) how: String,
}

/// Who the child is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum User {
    /// May mount, and look into every folder of its user.
    Root,
    /// Has no rights but its user's.
    Plain,
    /// Stays who it is, with mounts of its own: who may not make them gets none.
    Same,
}

/// What a system says that lets this user have no namespace, or has no such call, device or file
/// system, or has no more of them. Anything else is a failure.
const NOT_HAD: [i32; 5] = [
    libc::EPERM,
    libc::EACCES,
    libc::ENOSYS,
    libc::ENODEV,
    libc::ENOSPC,
];

/// A test is passed over, as the system does not have what it needs; `make test-all` lets none be.
///
/// # Panics
/// When that is no reason, or `KVDEPOT_NO_SKIPS` is set.
pub(crate) fn skip(needed: &str, error: &io::Error) {
    let had = !error
        .raw_os_error()
        .is_some_and(|errno| NOT_HAD.contains(&errno));
    assert!(!had, "{needed}: {error}");
    let strict = std::env::var_os("KVDEPOT_NO_SKIPS").is_some_and(|value| value != "0");
    assert!(!strict, "KVDEPOT_NO_SKIPS: {needed}: {error}");
    println!("skipped: {needed}: {error}");
}

/// Starts a role of a test.
///
/// # Errors
/// What the system says where it has no namespace for this user, or no such file system.
pub(crate) fn start(
    test: &str,
    role: &str,
    values: &[(&str, &str)],
    user: User,
    mounts: &[Mount],
) -> io::Result<Child> {
    // SAFETY: these two calls only ask.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    let inner = if user == User::Root { 0 } else { 1000 };
    let text = |text: &str| CString::new(text).unwrap();
    let mut maps = vec![
        (text("/proc/self/setgroups"), "deny".to_owned()),
        (text("/proc/self/uid_map"), format!("{inner} {uid} 1")),
        (text("/proc/self/gid_map"), format!("{inner} {gid} 1")),
    ];
    let mut spaces = libc::CLONE_NEWUSER | libc::CLONE_NEWNS;
    if user == User::Same {
        maps.clear();
        spaces = libc::CLONE_NEWNS;
    }
    let mounts: Vec<_> = mounts
        .iter()
        .map(|mount| {
            let at = text(mount.at.to_str().unwrap());
            (text(mount.kind), at, text(&mount.how))
        })
        .collect();
    let apart = move || {
        let done = |answer: i32| match answer {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        };
        // SAFETY: the child of a fork has one thread.
        done(unsafe { libc::unshare(spaces) })?;
        for (file, line) in &maps {
            // SAFETY: strings that end, and bytes of that length.
            unsafe {
                let fd = libc::open(file.as_ptr(), libc::O_WRONLY);
                let all = line.len() as isize;
                let written = libc::write(fd, line.as_ptr().cast(), line.len());
                libc::close(fd);
                done(i32::from(written != all))?;
            }
        }
        for (kind, at, how) in &mounts {
            let how = how.as_ptr().cast();
            // SAFETY: strings that end.
            done(unsafe { libc::mount(kind.as_ptr(), at.as_ptr(), kind.as_ptr(), 0, how) })?;
        }
        Ok(())
    };
    let prepare = |command: &mut Command| {
        // SAFETY: it makes system calls, of what was made before the fork.
        unsafe { command.pre_exec(apart) };
    };
    Child::try_start(test, role, values, prepare)
}

/// Mounts, or mounts again with other options (`MS_REMOUNT`, `MS_RDONLY`).
pub(crate) fn mount(kind: &str, at: &Path, flags: libc::c_ulong, how: &str) -> io::Result<()> {
    let text = |text: &str| CString::new(text).unwrap();
    let (kind, at, how) = (text(kind), text(at.to_str().unwrap()), text(how));
    let (kind, how) = (kind.as_ptr(), how.as_ptr().cast());
    // SAFETY: strings that end, and live until it has returned.
    match unsafe { libc::mount(kind, at.as_ptr(), kind, flags, how) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Runs `body` in a namespace of its own, in a role of a test, with a file system of that kind
/// where it is told; skips where there is none.
pub(crate) fn on(
    (test, role): (&str, &str),
    user: User,
    kind: &'static str,
    how: &str,
    body: impl FnOnce(&Path),
) {
    if let Some(own) = child::role() {
        assert_eq!(own, role);
        body(Path::new(&child::value("at")));
        child::say("done");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mount = Mount {
        kind,
        at: dir.path().into(),
        how: how.into(),
    };
    let at = [("at", dir.path().to_str().unwrap())];
    match start(test, role, &at, user, &[mount]) {
        Ok(mut child) => child.expect("done"),
        Err(error) => skip(&format!("a namespace with a {kind}"), &error),
    }
}

/// Has the system refuse a call from now on, in this process's later children.
pub(crate) fn refusing(command: &mut Command, call: i64, errno: i32) {
    let filter = filter_of(call, errno);
    // SAFETY: it makes system calls, of what was made before the fork.
    unsafe { command.pre_exec(move || install(filter)) };
}

/// The same, in all threads of this process.
pub(crate) fn refuse(call: i64, errno: i32) -> io::Result<()> {
    install(filter_of(call, errno))
}

fn filter_of(call: i64, errno: i32) -> [libc::sock_filter; 4] {
    let ins = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let (load, equal, answer) = (
        libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
        libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
        libc::BPF_RET | libc::BPF_K,
    );
    let refused = libc::SECCOMP_RET_ERRNO | errno as u32;
    [
        ins(load, 0, 0, 0),
        ins(equal, 0, 1, call as u32),
        ins(answer, 0, 0, refused),
        ins(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
    ]
}

fn install(mut filter: [libc::sock_filter; 4]) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: the program and its instructions live until the call has returned.
    let set = unsafe {
        i64::from(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
            | libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                libc::SECCOMP_FILTER_FLAG_TSYNC,
                &raw const program,
            )
    };
    match set {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
