//! Signals to processes that a history has started, and the end of a socket.

#![expect(unsafe_code, reason = "no safe call stops a process")]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use kvdepot_testkit::worker::Worker;

/// Stops every thread of a process.
pub fn stop(worker: &Worker) {
    send(worker, libc::SIGSTOP);
    let stat = format!("/proc/{}/stat", worker.pid());
    let begun = Instant::now();
    let stopped = || {
        let text = std::fs::read_to_string(&stat).unwrap_or_default();
        let at = text.rfind(')').map_or(0, |at| at + 2);
        matches!(text.as_bytes().get(at), None | Some(b'T' | b'Z'))
    };
    while !stopped() && begun.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Lets it go on.
pub fn proceed(worker: &Worker) {
    send(worker, libc::SIGCONT);
}

fn send(worker: &Worker, signal: libc::c_int) {
    // SAFETY: sends a signal to a child of this process that has not been waited for.
    let _gone = unsafe { libc::kill(worker.pid() as libc::pid_t, signal) };
}

/// Reads what has arrived, in the place of whoever waits for it; whether there was something.
pub fn steal(socket: i32) -> bool {
    let mut bytes = [0u8; 64 << 10];
    // SAFETY: reads into a local that has so many bytes, and refuses what is no socket.
    let count = unsafe {
        libc::recv(
            socket,
            bytes.as_mut_ptr().cast(),
            bytes.len(),
            libc::MSG_DONTWAIT,
        )
    };
    count > 0
}

/// Ends a connection of this process, whatever is on its way.
pub fn shut(socket: &OwnedFd) {
    // SAFETY: takes a descriptor's number and touches no memory.
    let _other = unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RDWR) };
}

/// Another descriptor of what has this number, if anything has.
pub fn duplicate(number: i32) -> Option<OwnedFd> {
    // SAFETY: takes a descriptor's number and touches no memory.
    let made = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
    // SAFETY: made here, and nobody else knows of it.
    (made >= 0).then(|| unsafe { OwnedFd::from_raw_fd(made) })
}
