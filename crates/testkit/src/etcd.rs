//! A real etcd of one member, which can be killed, stopped, restarted, and lose its memory.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::IntoRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// How long it may take to come up on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// An etcd; killed when dropped.
pub struct Etcd {
    binary: PathBuf,
    dir: TempDir,
    ports: [u16; 2],
    process: Option<Child>,
}

impl Etcd {
    /// Starts one; `None` where there is none on the path.
    #[must_use]
    pub fn start() -> Option<Etcd> {
        let folders = std::env::var_os("PATH")?;
        let mut paths = std::env::split_paths(&folders).map(|folder| folder.join("etcd"));
        let binary = paths.find(|path| path.is_file())?;
        // Its every write is synced: a disk would be what is waited for.
        let memory = Path::new("/dev/shm");
        let dir = match memory.is_dir() {
            true => tempfile::tempdir_in(memory),
            false => tempfile::tempdir(),
        };
        let mut etcd = Etcd {
            binary,
            dir: dir.unwrap(),
            ports: free_ports(),
            process: None,
        };
        etcd.run();
        Some(etcd)
    }

    /// Starts it, again where it had been killed, with what it remembers.
    pub fn run(&mut self) {
        assert!(self.process.is_none());
        let [client, peer] = self.ports.map(|port| format!("http://127.0.0.1:{port}"));
        let log = File::create(self.dir.path().join("log")).unwrap();
        let mut command = Command::new(&self.binary);
        command.arg("--data-dir").arg(self.dir.path().join("data"));
        for (name, value) in [
            ("--listen-client-urls", client.as_str()),
            ("--advertise-client-urls", &client),
            ("--listen-peer-urls", &peer),
            ("--initial-advertise-peer-urls", &peer),
            ("--initial-cluster", &format!("default={peer}")),
            // The least that a lease may take follows from these.
            ("--heartbeat-interval", "100"),
            ("--election-timeout", "1000"),
        ] {
            command.args([name, value]);
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        if cfg!(target_arch = "aarch64") {
            command.env("ETCD_UNSUPPORTED_ARCH", "arm64");
        }
        self.process = Some(command.spawn().unwrap());
        let end = Instant::now() + PATIENCE;
        while !self.is_healthy() {
            assert!(Instant::now() < end, "etcd does not answer");
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn is_healthy(&self) -> bool {
        let ask = || {
            let mut stream = TcpStream::connect(("127.0.0.1", self.port()))?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.write_all(b"GET /health HTTP/1.0\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok::<_, std::io::Error>(answer)
        };
        ask().is_ok_and(|answer| answer.contains("\"health\":\"true\""))
    }

    /// Where clients connect to.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.ports[0]
    }

    /// The same.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port())
    }

    /// Sends it a signal while it runs.
    pub fn signal(&self, which: Signal) {
        let pid = self.process.as_ref().unwrap().id();
        kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), which).unwrap();
    }

    /// It says nothing any more.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
    }

    /// It says again what it is asked.
    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    /// Kills it, if it runs.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// Everything that it knew is gone, while it does not run.
    pub fn forget(&self) {
        assert!(self.process.is_none());
        std::fs::remove_dir_all(self.dir.path().join("data")).unwrap();
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Reserves two ports of this host until the process ends.
///
/// A socket that is bound and does not listen keeps the system from giving its port to others.
/// A listener that asks for the port by its number gets it, as both sockets have `SO_REUSEADDR`.
///
/// # Panics
/// If the system has no free port.
#[must_use]
pub fn free_ports() -> [u16; 2] {
    [0, 1].map(|_| {
        let socket = net::socket_with(
            AddressFamily::INET,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        );
        let socket = socket.unwrap();
        net::sockopt::set_socket_reuseaddr(&socket, true).unwrap();
        net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = SocketAddr::try_from(net::getsockname(&socket).unwrap()).unwrap();
        let _stays_open = socket.into_raw_fd();
        address.port()
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_reserved_port_is_given_to_a_listener_that_names_it_alone() {
        let ports = free_ports();
        for _ in 0..2 {
            let others: Vec<TcpListener> = (0..200)
                .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
                .collect();
            let own = ports.map(|port| TcpListener::bind(("127.0.0.1", port)).unwrap());
            let other = |one: &TcpListener| ports.contains(&one.local_addr().unwrap().port());
            assert!(!others.iter().any(other) && own.iter().all(other));
        }
    }
}
