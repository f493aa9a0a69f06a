//! A target of this host, as its initiator sees it: a socket over which memory is lent.

use std::collections::HashMap;
use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_host::fork::{Origin, Unshared};
use parking_lot::Mutex;

use super::mapped::Mapped;
use super::words;
use crate::peer::{Peer, Shake};
use crate::wire::{Bytes, Head, Malformed, Row, Status, Verb};

/// Most bytes of an answer: 65,536 ranges, and what leads them.
const ANSWER_MAX: u64 = (1 << 16) * 32 + 16;

/// How long nobody knocks again where nobody has opened: most targets are on other hosts.
const PAUSE: Duration = Duration::from_secs(1);

/// What is known of a target.
enum Known {
    Lives(Arc<Neighbour>),
    IsNone { until: Instant },
}

impl Known {
    fn is_so(&self, now: Instant) -> bool {
        match self {
            Known::Lives(neighbour) => !neighbour.shared.is_over.load(Ordering::Acquire),
            Known::IsNone { until } => now < *until,
        }
    }
}

/// What is known of one target; locked while it is asked.
type Entry = Arc<Mutex<Option<Known>>>;

#[derive(Default)]
struct All {
    /// By what their engines drew.
    entries: HashMap<[u8; 16], Entry>,
    is_closed: bool,
}

/// The neighbours of an engine.
#[derive(Default)]
pub(crate) struct Neighbours {
    /// Not held while a target is asked.
    all: Mutex<All>,
}

impl Neighbours {
    /// The one that this peer is, if it is one.
    pub(crate) fn find(&self, peer: &Peer) -> Option<Arc<Neighbour>> {
        self.known(peer.shake(), peer.engine()?)
    }

    fn known(&self, shake: &Shake, target: [u8; 16]) -> Option<Arc<Neighbour>> {
        let entry = Arc::clone(self.all.lock().entries.entry(target).or_default());
        let mut known = entry.lock();
        if !known.as_ref().is_some_and(|one| one.is_so(Instant::now())) {
            let knocked = Neighbour::knock(shake, target);
            let knocked =
                knocked.inspect_err(|error| tracing::debug!(%error, "no local connection"));
            *known = Some(match knocked {
                Ok(neighbour) => Known::Lives(Arc::new(neighbour)),
                Err(_) => Known::IsNone {
                    until: Instant::now() + PAUSE,
                },
            });
        }
        let found = match &*known {
            Some(Known::Lives(neighbour)) => Some(Arc::clone(neighbour)),
            _ => None,
        };
        drop(known);
        // `close` does not wait for an entry that is locked.
        if self.all.lock().is_closed {
            if let Some(neighbour) = &found {
                neighbour.close();
            }
            return None;
        }
        found
    }

    /// Lets go of those that have ended, and of those that nothing is used of. Whether any is left.
    pub(crate) fn let_go(&self) -> bool {
        let now = Instant::now();
        let is_left = |_: &[u8; 16], entry: &mut Entry| {
            // One that others have is asked now, or has just been.
            let Some(entry) = Arc::get_mut(entry) else {
                return false;
            };
            match entry.get_mut() {
                Some(Known::Lives(neighbour)) => Arc::strong_count(neighbour) == 1,
                Some(none) => !none.is_so(now),
                None => true,
            }
        };
        let mut all = self.all.lock();
        let left: Vec<_> = all.entries.extract_if(is_left).collect();
        let is_any = !all.entries.is_empty();
        drop(all);
        // They wait for threads that have nothing to do.
        drop(left);
        is_any
    }

    /// Lets go of all of them, for good. A call that asks a target now finds that out by itself.
    pub(crate) fn close(&self) {
        let entries = {
            let mut all = self.all.lock();
            all.is_closed = true;
            std::mem::take(&mut all.entries)
        };
        for entry in entries.into_values() {
            let known = entry.try_lock().and_then(|mut known| known.take());
            if let Some(Known::Lives(neighbour)) = known {
                neighbour.close();
            }
        }
    }
}

/// What was lent, and its number; `None` where it cannot be reached from here.
type Lent = Option<(u32, Arc<Mapped>)>;

struct Shared {
    socket: Unshared<UnixStream>,
    /// What was lent, by its numbers.
    lent: Mutex<HashMap<u32, Arc<Mapped>>>,
    answers: Sender<Lent>,
    process: i32,
    /// Nothing is lent any more.
    is_over: AtomicBool,
}

/// A neighbour.
pub(crate) struct Neighbour {
    shared: Arc<Shared>,
    /// Whoever asks, and the answer to it.
    asking: Mutex<(u64, Receiver<Lent>)>,
    timeout: Duration,
    origin: Origin,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Neighbour {
    /// Knocks at a target; an error where it is on another host, or another user's.
    pub(crate) fn knock(shake: &Shake, target: [u8; 16]) -> io::Result<Neighbour> {
        let origin = Origin::here().map_err(io::Error::other)?;
        let socket = words::connect(target)?;
        socket.set_write_timeout(Some(shake.timeout))?;
        let process = words::process(&socket).filter(|_| words::is_ours(&*socket));
        let process = process.ok_or(io::ErrorKind::PermissionDenied)?;
        let challenge = shake.greet(socket.as_fd(), 0).map_err(io::Error::other)?;
        if challenge.engine != target {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let (answers, answer) = channel();
        let shared = Arc::new(Shared {
            socket,
            lent: Mutex::default(),
            answers,
            process,
            is_over: AtomicBool::new(false),
        });
        let its = Arc::clone(&shared);
        let thread = kvdepot_host::cpu::spawn("kvdepot-near", move || its.listen())?;
        Ok(Neighbour {
            shared,
            asking: Mutex::new((0, answer)),
            timeout: shake.timeout,
            origin,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// What a name grants, where this process can reach it by itself.
    pub(crate) fn map(&self, name: &[u8]) -> Lent {
        let mut asking = self.asking.lock();
        asking.0 += 1;
        let head = Head::request(Verb::Map, 0, asking.0, name.len() as u64, false);
        words::send(&self.shared.socket, &head, name, &[]).ok()?;
        let answer = asking.1.recv_timeout(self.timeout);
        if answer.is_err() {
            // An answer that comes later would be taken for another one's. Its thread ends the rest
            // of the socket, once nothing of the target is used any more.
            drop(self.shared.socket.shutdown(Shutdown::Read));
        }
        answer.ok().flatten()
    }

    /// A range is not used any more.
    pub(crate) fn let_go(&self, number: u32) {
        // A forked process has a copy of the socket, and nothing to say over it.
        if self.origin.is_here() {
            self.shared.end(number);
        }
    }

    /// Lets go of everything.
    pub(crate) fn close(&self) {
        drop(self.shared.socket.shutdown(Shutdown::Read));
        let thread = self.thread.lock().take();
        drop(thread.map(JoinHandle::join));
    }
}

impl std::fmt::Debug for Neighbour {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Neighbour")
            .field("process", &self.shared.process)
            .finish_non_exhaustive()
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        // A forked process has the same socket, but not the thread.
        if self.origin.is_here() {
            self.close();
        }
    }
}

impl Shared {
    /// Hears answers, and what is wanted back, until the target or this engine ends. The socket
    /// ends when nothing of the target is used any more, and not before: that is what it goes by.
    fn listen(&self) {
        while self.hear().is_ok() {}
        let lent: Vec<_> = self.lent.lock().drain().collect();
        for (_, mapped) in lent {
            mapped.end();
        }
        self.is_over.store(true, Ordering::Release);
        // Whoever waits for an answer hears that there is none.
        drop(self.answers.send(None));
        drop(self.socket.shutdown(Shutdown::Both));
    }

    fn hear(&self) -> io::Result<()> {
        let (head, descriptors) = words::receive_head(&self.socket)?;
        if head.withdraws() {
            self.end(head.first.grant.get());
            return Ok(());
        }
        let number = head.number.get();
        let status = head
            .answers(Verb::Map, number, Bytes::Upto(ANSWER_MAX))
            .map_err(broken)?;
        if status != Status::Done {
            drop(self.answers.send(None));
            return Ok(());
        }
        let mut body = vec![0; head.bytes.get() as usize];
        words::fill(&self.socket, &mut body)?;
        let grant = head.first.grant.get();
        let answer = match Mapped::new(&body, descriptors, self.process) {
            Ok(mapped) => {
                let mapped = Arc::new(mapped);
                self.lent.lock().insert(grant, Arc::clone(&mapped));
                Some((grant, mapped))
            }
            Err(error) => {
                tracing::debug!(%error, "using the network to reach memory of this host");
                self.unmapped(grant);
                None
            }
        };
        drop(self.answers.send(answer));
        Ok(())
    }

    fn end(&self, number: u32) {
        let mapped = self.lent.lock().remove(&number);
        if let Some(mapped) = mapped {
            mapped.end();
            self.unmapped(number);
        }
    }

    fn unmapped(&self, number: u32) {
        let head = Head::request(Verb::Unmap, 1, 0, 0, false).with(Row::new(number, 0, 0));
        // Who does not hear it has ended.
        drop(words::send(&self.socket, &head, &[], &[]));
    }
}

fn broken(error: Malformed) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use arc_swap::ArcSwap;

    use super::*;
    use crate::grant::Names;
    use crate::local::Door;
    use crate::peer::{Secrets, random};

    #[test]
    fn who_opens_later_is_found_and_who_is_gone_is_forgotten() {
        let shake = || Shake {
            initiator: [0; 16],
            engine: random().unwrap(),
            secrets: Arc::new(ArcSwap::from_pointee(Secrets::new(&[], None))),
            timeout: Duration::from_secs(5),
        };
        let (mine, theirs) = (shake(), shake());
        let neighbours = Neighbours::default();
        let find = || neighbours.known(&mine, theirs.engine);
        assert!(find().is_none());
        let door = Door::open(theirs.clone(), Arc::new(Names::default())).unwrap();
        std::thread::sleep(PAUSE);
        let known = find().unwrap();
        assert!(Arc::ptr_eq(&known, &find().unwrap()));
        door.close();
        while !known.shared.is_over.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        let weak = Arc::downgrade(&known);
        drop((known, door));
        assert!(find().is_none() && weak.upgrade().is_none());
        neighbours.close();
    }
}
