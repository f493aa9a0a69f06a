//! What stands between two hosts and does to their bytes whatever a test wants.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a plain list of a test")]
pub enum Way {
    /// From the initiator.
    There,
    /// From the target.
    Back,
}

/// Some bytes of a connection that are about to be passed on.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_structs, reason = "words of a test")]
pub struct Chunk {
    /// Its connection, from 0 on.
    pub connection: u64,
    /// Which way they go.
    pub way: Way,
    /// How many went this way before.
    pub before: u64,
}

/// What becomes of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a plain list of a test")]
pub enum Act {
    /// They are passed on.
    Pass,
    /// The first so many are passed, then both sides see the connection end.
    Cut(usize),
    /// The initiator sees the connection end at once; the target gets these bytes, and those that
    /// came before them, so much later, and only then its end.
    Late(Duration),
    /// They wait.
    Delay(Duration),
    /// This bit is another.
    Flip(u64),
}

type Rule = Box<dyn FnMut(Chunk, &[u8]) -> Act + Send>;

struct Inner {
    to: Mutex<SocketAddr>,
    rule: Mutex<Rule>,
    connections: AtomicU64,
    is_over: AtomicBool,
    open: Mutex<Vec<TcpStream>>,
}

/// It listens, and passes on what it hears.
pub struct Proxy {
    inner: Arc<Inner>,
    /// Where it listens.
    pub address: SocketAddr,
}

impl Proxy {
    /// In front of a target.
    pub fn to(target: SocketAddr, rule: impl FnMut(Chunk, &[u8]) -> Act + Send + 'static) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let inner = Arc::new(Inner {
            to: Mutex::new(target),
            rule: Mutex::new(Box::new(rule)),
            connections: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            open: Mutex::default(),
        });
        let its = Arc::clone(&inner);
        std::thread::spawn(move || {
            for initiator in listener.incoming() {
                if its.is_over.load(Ordering::Acquire) {
                    return;
                }
                let Ok(initiator) = initiator else { continue };
                let number = its.connections.fetch_add(1, Ordering::AcqRel);
                // Where there is no target the initiator sees its connection end.
                let to = *its.to.lock().unwrap();
                let Ok(target) = TcpStream::connect(to) else {
                    continue;
                };
                its.join(number, initiator, target);
            }
        });
        Proxy { inner, address }
    }

    /// One that changes nothing.
    pub fn plain(target: SocketAddr) -> Proxy {
        Proxy::to(target, |_, _| Act::Pass)
    }

    /// What is done from now on.
    pub fn rule(&self, rule: impl FnMut(Chunk, &[u8]) -> Act + Send + 'static) {
        *self.inner.rule.lock().unwrap() = Box::new(rule);
    }

    /// Where new connections go.
    pub fn redirect(&self, target: SocketAddr) {
        *self.inner.to.lock().unwrap() = target;
    }

    /// Connections so far.
    pub fn connections(&self) -> u64 {
        self.inner.connections.load(Ordering::Acquire)
    }

    /// Ends all connections that there are.
    pub fn cut_all(&self) {
        for stream in self.inner.open.lock().unwrap().drain(..) {
            let _gone = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.inner.is_over.store(true, Ordering::Release);
        self.cut_all();
        let _woken = TcpStream::connect(self.address);
    }
}

impl Inner {
    fn join(self: &Arc<Inner>, number: u64, initiator: TcpStream, target: TcpStream) {
        initiator.set_nodelay(true).unwrap();
        target.set_nodelay(true).unwrap();
        let mut open = self.open.lock().unwrap();
        open.push(initiator.try_clone().unwrap());
        open.push(target.try_clone().unwrap());
        drop(open);
        let ends = (initiator.try_clone().unwrap(), target.try_clone().unwrap());
        let its = Arc::clone(self);
        std::thread::spawn(move || its.pump(number, Way::There, &ends.0, &ends.1));
        let its = Arc::clone(self);
        std::thread::spawn(move || its.pump(number, Way::Back, &target, &initiator));
    }

    fn pump(&self, connection: u64, way: Way, mut from: &TcpStream, mut to: &TcpStream) {
        let mut bytes = vec![0; 64 << 10];
        let mut before = 0;
        loop {
            let got = match from.read(&mut bytes) {
                Ok(0) | Err(_) => break,
                Ok(got) => got,
            };
            let some = &mut bytes[..got];
            let chunk = Chunk {
                connection,
                way,
                before,
            };
            let act = (self.rule.lock().unwrap())(chunk, some);
            before += got as u64;
            match act {
                Act::Pass => {}
                Act::Delay(time) => std::thread::sleep(time),
                Act::Flip(bit) => some[(bit / 8) as usize % got] ^= 1 << (bit % 8),
                Act::Cut(first) => {
                    let _gone = to.write_all(&some[..first.min(got)]);
                    break;
                }
                Act::Late(time) => {
                    assert_eq!(way, Way::There);
                    let _gone = from.shutdown(Shutdown::Both);
                    std::thread::sleep(time);
                    let _gone = to.write_all(some);
                    // It may have been ended by who took its place; who has not reads all of it.
                    std::thread::sleep(Duration::from_millis(300));
                    break;
                }
            }
            // What comes back for an initiator that is gone is passed over: what it has sent may
            // still be on its way.
            if to.write_all(some).is_err() && way == Way::There {
                break;
            }
        }
        let _gone = from.shutdown(Shutdown::Both);
        let _gone = to.shutdown(Shutdown::Both);
    }
}
