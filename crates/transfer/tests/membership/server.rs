//! A real etcd, which is asked things of its own, and a way to it that can be cut.

#![expect(clippy::print_stdout, reason = "says why a test is skipped")]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use kvdepot_testkit::etcd::{Etcd, free_ports};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// What a busy machine may take for anything that is waited for.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until something holds.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < end, "not within {PATIENCE:?}: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A signal for a process of this test.
pub(crate) fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

/// An etcd; killed when dropped.
pub(crate) struct Server(Etcd);

impl Server {
    /// Starts one. `None`, with a word, where there is no etcd to start, unless `KVDEPOT_NO_SKIPS`
    /// is set: then that is a failure.
    pub(crate) fn start() -> Option<Server> {
        let etcd = Etcd::start();
        if etcd.is_none() {
            let strict = std::env::var_os("KVDEPOT_NO_SKIPS").is_some_and(|value| value != "0");
            assert!(!strict, "KVDEPOT_NO_SKIPS: no etcd (Debian: etcd-server)");
            println!("skipped: no etcd on PATH (Debian: etcd-server)");
        }
        etcd.map(Server)
    }

    fn try_ask(&self, path: &str, body: &Value) -> Option<Value> {
        let url = format!("{}/v3/{path}", self.url());
        let mut answer = ureq::post(&url).send(body.to_string()).ok()?;
        serde_json::from_str(&answer.body_mut().read_to_string().ok()?).ok()
    }

    pub(crate) fn ask(&self, path: &str, body: &Value) -> Value {
        self.try_ask(path, body).unwrap()
    }

    /// Forgets all revisions but the newest.
    pub(crate) fn compact(&self) {
        let answer = self.ask("kv/range", &json!({"key": "YQ=="}));
        let revision = answer["header"]["revision"].clone();
        let compacted = self.ask("kv/compaction", &json!({"revision": revision}));
        assert!(compacted.get("header").is_some(), "{compacted}");
    }
}

impl Deref for Server {
    type Target = Etcd;

    fn deref(&self) -> &Etcd {
        &self.0
    }
}

impl DerefMut for Server {
    fn deref_mut(&mut self) -> &mut Etcd {
        &mut self.0
    }
}

/// An address that refuses all connections.
pub(crate) fn refusing() -> String {
    format!("http://127.0.0.1:{}", free_ports()[0])
}

/// An address that takes connections and never answers, while the listener is held.
pub(crate) fn hanging() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    (listener, url)
}

/// A way to a server, which can be cut: connections end then, and new ones end at once.
pub(crate) struct Way {
    url: String,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    is_cut: bool,
    ends: Vec<TcpStream>,
}

impl Way {
    pub(crate) fn to(server: &Server) -> Way {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new(State::default()));
        let (shared, port) = (Arc::clone(&state), server.port());
        // Ends with the process.
        thread::spawn(move || {
            for near in listener.incoming() {
                let near = near.unwrap();
                let Ok(far) = TcpStream::connect(("127.0.0.1", port)) else {
                    continue;
                };
                let mut state = shared.lock().unwrap();
                if state.is_cut {
                    continue;
                }
                let clones = || [near.try_clone().unwrap(), far.try_clone().unwrap()];
                state.ends.extend(clones());
                let [one, other] = clones();
                thread::spawn(move || pass(near, far));
                thread::spawn(move || pass(other, one));
            }
        });
        Way { url, state }
    }

    pub(crate) fn url(&self) -> String {
        self.url.clone()
    }

    pub(crate) fn cut(&self) {
        let mut state = self.state.lock().unwrap();
        state.is_cut = true;
        for end in state.ends.drain(..) {
            // It may have ended by itself.
            let _was_open = end.shutdown(Shutdown::Both);
        }
    }

    pub(crate) fn heal(&self) {
        self.state.lock().unwrap().is_cut = false;
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream) {
    let mut bytes = [0; 1 << 14];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _was_open = (to.shutdown(Shutdown::Both), from.shutdown(Shutdown::Both));
}
