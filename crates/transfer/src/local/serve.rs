//! The target's side: neighbours that knock, what each has mapped, and taking it back.

use std::collections::HashMap;
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kvdepot_host::fork::Unshared;
use kvdepot_host::limits;
use kvdepot_media::{Access, Kind, Mapping};
use parking_lot::Mutex;
use zerocopy::IntoBytes;

use super::words::{self, Lead, Place, Reach};
use crate::arrivals::{self, Arrived, Host};
use crate::grant::{Grant, Names, Use};
use crate::line::Way;
use crate::peer::Shake;
use crate::socket;
use crate::wire::{Greeting, Head, Malformed, Row, Status, Verb};

/// Most ranges of a grant that neighbours reach by themselves: the answer is one message.
const PLACES_MAX: usize = 1 << 16;

/// Most neighbours at a time.
const NEIGHBOURS_MAX: usize = 1024;

/// They take no more than this part of the descriptors that the process may have.
const DESCRIPTORS_PART: usize = 8;

/// A neighbour.
struct Guest {
    socket: Unshared<UnixStream>,
    /// What it has mapped, by the numbers it was told.
    mapped: Mutex<HashMap<u32, Use>>,
}

struct House {
    shake: Shake,
    names: Arc<Names>,
    guests: Mutex<Vec<Arc<Guest>>>,
    count: AtomicUsize,
    is_closing: AtomicBool,
}

/// Where neighbours knock.
pub(crate) struct Door {
    house: Arc<House>,
    listener: Arc<Unshared<UnixListener>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Guest {
    /// Ends this side of the socket. A neighbour that has mapped something ends its own side when
    /// it has let go of everything; one that has mapped nothing is not waited for.
    fn end(&self) {
        // First, so that `House::map` does not send under the lock for long.
        drop(self.socket.shutdown(Shutdown::Write));
        if self.mapped.lock().is_empty() {
            drop(self.socket.shutdown(Shutdown::Read));
        }
    }
}

impl Door {
    /// Opens one; where the system does not allow it neighbours come by the network.
    pub(crate) fn open(shake: Shake, names: Arc<Names>) -> io::Result<Door> {
        let address = words::address(shake.engine)?;
        let listener = Unshared::open(|| UnixListener::bind_addr(&address))?;
        let listener = Arc::new(listener);
        let house = Arc::new(House {
            shake,
            names,
            guests: Mutex::default(),
            count: AtomicUsize::new(0),
            is_closing: AtomicBool::new(false),
        });
        let (its, theirs) = (Arc::clone(&listener), Arc::clone(&house));
        let accept = move || arrivals::run(&its, &theirs);
        let thread = kvdepot_host::cpu::spawn("kvdepot-door", accept)?;
        Ok(Door {
            house,
            listener,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Asks those that have a grant mapped to let go of it. Each does, or its process ends.
    pub(crate) fn take_back(&self, grant: &Arc<Grant>) {
        for guest in self.house.guests.lock().iter() {
            let mapped = guest.mapped.lock();
            let theirs = mapped.iter().filter(|(_, one)| one.is_of(grant));
            for (number, _) in theirs {
                let head = Head::request(Verb::Withdraw, 1, 0, 0, false);
                let head = head.with(Row::new(*number, 0, 0));
                if words::send(&guest.socket, &head, &[], &[]).is_err() {
                    // It hears this instead, and lets go of everything.
                    drop(guest.socket.shutdown(Shutdown::Write));
                }
            }
        }
    }

    /// Ends all of it. Neighbours that have mapped something let go of it first.
    pub(crate) fn close(&self) {
        self.house.is_closing.store(true, Ordering::Release);
        let _listens = rustix::net::shutdown(&**self.listener, rustix::net::Shutdown::Both);
        let thread = self.thread.lock().take();
        drop(thread.map(JoinHandle::join));
        for guest in self.house.guests.lock().iter() {
            guest.end();
        }
        while self.house.count.load(Ordering::Acquire) > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Host for House {
    fn shake(&self) -> &Shake {
        &self.shake
    }

    fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Acquire)
    }

    fn may_try(&self, socket: &OwnedFd) -> bool {
        words::is_ours(socket)
    }

    fn greeting(&self) -> (Greeting, u32) {
        (Greeting::GoOn, 1)
    }

    fn enter(self: &Arc<Self>, arrived: Arrived) {
        let Arrived { way, welcome, .. } = arrived;
        let Way::Plain(socket) = way else { return };
        let most = NEIGHBOURS_MAX.min((limits::descriptors() / DESCRIPTORS_PART).max(1));
        if self.count.fetch_add(1, Ordering::AcqRel) >= most {
            self.count.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        let (theirs, socket) = (Arc::clone(self), socket.map(UnixStream::from));
        let receive = move || theirs.receive(socket, &welcome);
        if kvdepot_host::cpu::spawn("kvdepot-guest", receive).is_err() {
            self.count.fetch_sub(1, Ordering::AcqRel);
        }
    }

    fn refused(&self, _peer: Option<SocketAddr>, why: &str) {
        // It is this user's, and comes by the network then.
        tracing::debug!(why, "handshake with a process of this host failed");
    }
}

impl House {
    fn receive(&self, socket: Unshared<UnixStream>, welcome: &[u8]) {
        if self.welcome(&socket, welcome).is_ok() {
            let guest = Arc::new(Guest {
                socket,
                mapped: Mutex::default(),
            });
            self.guests.lock().push(Arc::clone(&guest));
            if self.is_closing.load(Ordering::Acquire) {
                guest.end();
            }
            while self.answer(&guest).is_ok() {}
            // A neighbour ends its side when it has let go of all that it had, and so does the
            // kernel when its process is gone. One that breaks a rule, or does not listen, still
            // has it until then.
            guest.end();
            words::drain(&guest.socket);
            self.guests.lock().retain(|one| !Arc::ptr_eq(one, &guest));
            guest.mapped.lock().clear();
        }
        self.count.fetch_sub(1, Ordering::AcqRel);
    }

    fn welcome(&self, socket: &UnixStream, welcome: &[u8]) -> io::Result<()> {
        socket.set_nonblocking(false)?;
        // What is said is said at once, or the neighbour does not listen.
        socket.set_write_timeout(Some(self.shake.timeout))?;
        socket::send(socket.as_fd(), welcome)
    }

    fn answer(&self, guest: &Guest) -> io::Result<()> {
        let (head, _) = words::receive_head(&guest.socket)?;
        let asked = head.asks_neighbour().map_err(broken)?;
        match asked.verb {
            Verb::Unmap => {
                guest.mapped.lock().remove(&head.first.grant.get());
                if self.is_closing.load(Ordering::Acquire) {
                    guest.end();
                }
                Ok(())
            }
            _ => {
                let mut name = vec![0; asked.bytes as usize];
                words::fill(&guest.socket, &mut name)?;
                self.map(guest, &head, &name)
            }
        }
    }

    fn map(&self, guest: &Guest, head: &Head, name: &[u8]) -> io::Result<()> {
        let found = self.names.find(name);
        let used = found.and_then(|grant| Some((Use::begin(&grant)?, grant)));
        let answer = used.and_then(|(used, grant)| Some((used, Layout::of(&grant)?)));
        let Some((used, layout)) = answer else {
            return words::send(&guest.socket, &head.answer(Status::Unknown, 0), &[], &[]);
        };
        let mut mapped = guest.mapped.lock();
        if self.is_closing.load(Ordering::Acquire) {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let mut number = mapped.len() as u32;
        while mapped.contains_key(&number) {
            number = number.wrapping_add(1);
        }
        mapped.insert(number, used);
        // Who withdraws it from now on finds it there.
        if mapped.get(&number).is_some_and(Use::is_wanted_back) {
            mapped.remove(&number);
            return words::send(&guest.socket, &head.answer(Status::Unknown, 0), &[], &[]);
        }
        let answer = head.answer(Status::Done, layout.body.len() as u64);
        let answer = answer.with(Row::new(number, 0, 0));
        let descriptors: Vec<_> = layout.descriptors.iter().map(AsFd::as_fd).collect();
        // Under the lock, so that nothing is wanted back before it was lent, or amid the answer.
        let sent = words::send(&guest.socket, &answer, &layout.body, &descriptors);
        drop(mapped);
        sent
    }
}

/// Where a grant's memory is, for a neighbour.
struct Layout {
    body: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl Layout {
    fn of(grant: &Grant) -> Option<Layout> {
        Self::by_mapping(grant).or_else(|| Self::by_process(grant))
    }

    fn lead(grant: &Grant, reach: Reach) -> Vec<u8> {
        let lead = Lead {
            len: grant.len().into(),
            reach: (reach as u32).into(),
            rights: grant.rights.bits().into(),
        };
        lead.as_bytes().to_vec()
    }

    fn by_mapping(grant: &Grant) -> Option<Layout> {
        let mut body = Self::lead(grant, Reach::Mapping);
        let (mut descriptors, mut known) = (Vec::new(), Vec::new());
        let buffers = grant.buffers();
        if buffers.len() > PLACES_MAX {
            return None;
        }
        for buffer in buffers.iter() {
            let (mapping, at) = Mapping::of_buffer(buffer)?;
            // A file that somebody cuts short is the target's to notice; devices have a geometry.
            if mapping.kind() != Kind::Anonymous {
                return None;
            }
            let position = known.iter().position(|one| Arc::ptr_eq(one, &mapping));
            let descriptor = position.unwrap_or(known.len());
            if position.is_none() {
                if known.len() == kvdepot_host::fds::DESCRIPTORS_MAX {
                    return None;
                }
                let access = match grant.rights.write {
                    true => Access::ReadWrite,
                    false => Access::ReadOnly,
                };
                descriptors.push(mapping.try_clone_fd(access).ok()?);
                known.push(Arc::clone(&mapping));
            }
            let place = Place {
                at: at.into(),
                len: (buffer.len() as u64).into(),
                medium: mapping.len().into(),
                descriptor: (descriptor as u32).into(),
                zero: 0.into(),
            };
            body.extend_from_slice(place.as_bytes());
        }
        Some(Layout { body, descriptors })
    }

    fn by_process(grant: &Grant) -> Option<Layout> {
        let mut body = Self::lead(grant, Reach::Process);
        let buffers = grant.buffers();
        if buffers.len() > PLACES_MAX {
            return None;
        }
        for buffer in buffers.iter() {
            let place = Place {
                at: (buffer.addr() as u64).into(),
                len: (buffer.len() as u64).into(),
                medium: 0.into(),
                descriptor: 0.into(),
                zero: 0.into(),
            };
            body.extend_from_slice(place.as_bytes());
        }
        Some(Layout {
            body,
            descriptors: Vec::new(),
        })
    }
}

fn broken(error: Malformed) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
