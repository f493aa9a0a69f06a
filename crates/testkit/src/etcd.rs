//! A real etcd of one member, which can be killed, stopped, restarted, and lose its memory.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

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

/// Ports that nobody has now.
#[must_use]
pub fn free_ports() -> [u16; 2] {
    let listeners = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}
