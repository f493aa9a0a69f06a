//! Whether a client lives, and what ends what it held: here its process and its seat in the roster;
//! elsewhere a lease that runs out, and a grant that is revoked.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_arena::Error;
use kvdepot_host::peer::Process;

use crate::server::roster::Roster;

/// A client, as far as its owner has to know whether anything of it may still write.
pub(crate) trait Liveness: Send + Sync {
    /// Its process, or whom its lease was given to: for logs, and to know it when it comes back.
    fn who(&self) -> u32;

    /// Waits until there is something to read from its connection, the end included, or it has
    /// ended. True for the connection: what a client has said counts also after its end, unless it
    /// was fenced.
    fn wait_readable(&self, connection: &UnixStream) -> Result<bool, Error>;

    /// Waits so long for its end; whether it has ended.
    fn wait_end(&self, timeout: Duration) -> Result<bool, Error>;

    /// Keeps its own lanes from every place, for good, before any of it is somebody else's.
    fn fence(&self) -> Result<(), Error>;

    /// Whether it was fenced: what it says since then of bytes that it moved is not believed.
    fn is_fenced(&self) -> bool;

    /// Keeps whoever moves for it from every place, for good. False when some are still at one
    /// after `timeout`.
    fn clear(&self, timeout: Duration) -> Result<bool, Error>;
}

/// A client's connection, which is waited for no longer than the client lives: a child that it has
/// forked may have the other end open, in the middle of a frame.
pub(crate) struct WhileAlive<'a> {
    client: &'a dyn Liveness,
    connection: &'a UnixStream,
    /// The client has, and has said all that it will.
    pub(crate) has_ended: bool,
}

impl<'a> WhileAlive<'a> {
    pub(crate) fn new(client: &'a dyn Liveness, connection: &'a UnixStream) -> WhileAlive<'a> {
        WhileAlive {
            client,
            connection,
            has_ended: false,
        }
    }
}

impl Read for WhileAlive<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self.client.wait_readable(self.connection) {
            Ok(true) => self.connection.read(bytes),
            Ok(false) => {
                self.has_ended = true;
                Err(io::ErrorKind::ConnectionAborted.into())
            }
            Err(error) => Err(io::Error::other(error)),
        }
    }
}

/// A process of this host.
pub(crate) struct Local {
    pub(crate) process: Process,
    pub(crate) roster: Arc<Roster>,
    pub(crate) seat: u64,
}

impl Liveness for Local {
    fn who(&self) -> u32 {
        self.process.identity().pid
    }

    fn wait_readable(&self, connection: &UnixStream) -> Result<bool, Error> {
        Ok(self.process.wait_readable(connection)?)
    }

    fn wait_end(&self, timeout: Duration) -> Result<bool, Error> {
        Ok(self.process.wait_dead(timeout)?)
    }

    /// Its lanes have stopped, by its word or with its process.
    fn fence(&self) -> Result<(), Error> {
        Ok(())
    }

    fn is_fenced(&self) -> bool {
        false
    }

    fn clear(&self, timeout: Duration) -> Result<bool, Error> {
        self.roster.close(self.seat, timeout)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Instant;

    use kvdepot_arena::{Key, NamespaceId};
    use kvdepot_host::fds;
    use kvdepot_store::{Config, Depot, Serves, Stats};
    use parking_lot::Mutex;
    use serde_json::json;

    use super::*;
    use crate::frame::hello::{Former, Role, receive_welcome, send_request};
    use crate::frame::rows::{MovedRow, NameRow, Rows, marked};
    use crate::frame::verbs::{self as say, Asks, Says, Verb};
    use crate::frame::{Frame, Out};
    use crate::line::incoming::Incoming;
    use crate::server::{Clients, Server};

    const PATIENCE: Duration = Duration::from_secs(20);
    const SLICE: Duration = Duration::from_millis(1);
    const NAMESPACE: NamespaceId = NamespaceId([3; 16]);
    const LEN: u64 = 5000;

    /// What a client of another host has: it runs out, and what it may write is revoked.
    #[derive(Default)]
    struct Lease {
        over: AtomicBool,
        revoked: AtomicBool,
        /// Whoever moves for it has not been heard of yet.
        busy: AtomicBool,
    }

    struct Leased(Arc<Lease>);

    impl Liveness for Leased {
        fn who(&self) -> u32 {
            std::process::id()
        }

        fn wait_readable(&self, connection: &UnixStream) -> Result<bool, Error> {
            loop {
                if self.0.over.load(Ordering::SeqCst) {
                    return Ok(false);
                }
                if fds::wait_readable(connection, SLICE)? {
                    return Ok(true);
                }
            }
        }

        fn wait_end(&self, _: Duration) -> Result<bool, Error> {
            std::thread::sleep(SLICE);
            Ok(self.0.over.load(Ordering::SeqCst))
        }

        fn fence(&self) -> Result<(), Error> {
            self.0.revoked.store(true, Ordering::SeqCst);
            Ok(())
        }

        fn is_fenced(&self) -> bool {
            self.0.revoked.load(Ordering::SeqCst)
        }

        fn clear(&self, _: Duration) -> Result<bool, Error> {
            std::thread::sleep(SLICE);
            Ok(!self.0.busy.load(Ordering::SeqCst))
        }
    }

    /// A depot whose clients have leases, of which the first one's is told; and its clients.
    fn serve(dir: &Path) -> (Depot, Arc<Lease>, Arc<Mutex<Clients>>) {
        let lease = Arc::new(Lease::default());
        let first = Arc::clone(&lease);
        let config = json!({
            "dax": { "path": dir.join("arena"), "capacity": "4MiB" },
            "socket": dir.join("socket"),
        });
        let config = Config::new("Dax", &config).unwrap();
        let mut clients = Arc::default();
        let started = Depot::start_serving(&config, |core, about| {
            let watch = move |_, _, seat| {
                let lease = match seat {
                    1 => Arc::clone(&first),
                    _ => Arc::default(),
                };
                Box::new(Leased(lease)) as Box<dyn Liveness>
            };
            let server = Server::start_watching(&config, core, about, (Box::new(watch), None))?;
            let all = server.as_ref().map(|server| Arc::clone(&server.clients));
            clients = all.unwrap();
            Ok(server.map(|server| Box::new(server) as Box<dyn Serves>))
        });
        (started.unwrap().keep(), lease, clients)
    }

    /// A client that says what it likes.
    struct Peer {
        calls: UnixStream,
        tasks: UnixStream,
        number: u64,
    }

    impl Peer {
        fn attach(depot: &Depot) -> Peer {
            Peer::attach_as(depot, 0)
        }

        /// As a client that was there before, and has heard of nothing.
        fn attach_as(depot: &Depot, number: u64) -> Peer {
            let socket = depot.socket().unwrap();
            let attach = |role| {
                let stream = UnixStream::connect(&socket).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                send_request(&stream, role).unwrap();
                let welcome = receive_welcome(&stream).unwrap();
                (stream, welcome.terms.client)
            };
            let (calls, number) = attach(Role::Client(Former { number, heard: 0 }));
            let (tasks, _) = attach(Role::Tasks(number));
            Peer {
                calls,
                tasks,
                number,
            }
        }

        fn ask<C: Asks>(&self, call: &C) -> Option<Frame> {
            Out::new(call).number(1).send(&self.calls).ok()?;
            Incoming::default().next(&self.calls).ok()?
        }

        /// Begins a task; what its owner asks to be moved.
        fn begin<T: Says>(&self, task: &T) -> Frame {
            Out::new(task).number(7).send(&self.tasks).unwrap();
            let frame = Incoming::default().next(&self.tasks).unwrap().unwrap();
            assert_eq!(frame.verb, Verb::Move);
            frame
        }

        /// Says that the one block of a move is where it should be.
        fn moved(&self, asked: &Frame) {
            let moved = kvdepot_arena::verdict::Moved::Done(kvdepot_media::Checksum::default());
            let moved = Rows::from_iter([MovedRow::from(&moved)]);
            // The connection may have ended.
            let _sent = Out::new(&say::Moved { moved })
                .number(asked.number)
                .send(&self.tasks);
        }

        fn reserve(&self, key: Key) -> Rows<'static, NameRow> {
            let call = say::Reserve {
                namespace: NAMESPACE,
                after: None,
                no_room: 0,
                keys: std::slice::from_ref(&key).into(),
                parts: Rows::from_iter([1.into()]),
                lens: Rows::from_iter([LEN.into()]),
            };
            named(
                &self
                    .ask(&call)
                    .unwrap()
                    .answer::<say::Reserve<'_>>()
                    .unwrap(),
            )
        }

        fn pin(&self, key: Key) -> Rows<'static, NameRow> {
            let call = say::Pin {
                namespace: NAMESPACE,
                prefix: false,
                keys: std::slice::from_ref(&key).into(),
            };
            named(&self.ask(&call).unwrap().answer::<say::Pin<'_>>().unwrap())
        }

        /// Whether the owner publishes a reservation.
        fn commit(&self, names: &Rows<'_, NameRow>) -> bool {
            let call = say::Commit {
                names: (&names[..]).into(),
                parts: Rows::from_iter([1.into()]),
                checksums: Rows::from_iter([[0; 16]]),
            };
            let Some(frame) = self.ask(&call) else {
                return false;
            };
            let answer = frame.answer::<say::Commit<'_>>();
            answer.is_ok_and(|stored| stored[..] == [1])
        }
    }

    fn named(grant: &say::Grant<'_>) -> Rows<'static, NameRow> {
        let tiers = grant.tiers.iter().filter_map(|mark| marked(*mark));
        let names = tiers.zip(grant.places.iter());
        names
            .map(|(tier, place)| (tier, place.token()).into())
            .collect()
    }

    fn key(number: u8) -> Key {
        Key([number; 32])
    }

    fn eventually(what: &str, mut done: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !done() {
            assert!(begun.elapsed() < PATIENCE, "{what} did not come");
            std::thread::sleep(SLICE);
        }
    }

    fn held(depot: &Depot) -> (u64, u64) {
        let Stats { tiers, .. } = depot.stats();
        (tiers[0].pinned_blocks, tiers[0].reserved_blocks)
    }

    #[test]
    fn what_a_fenced_client_says_it_has_written_is_never_published() {
        let dir = tempfile::tempdir().unwrap();
        let (depot, lease, _) = serve(dir.path());
        let namespace = depot.namespace_by_id(NAMESPACE);
        let (late, other) = (Peer::attach(&depot), Peer::attach(&depot));
        let (mine, stored) = (late.reserve(key(1)), other.reserve(key(2)));
        // One that is in time, of either client.
        assert!(other.commit(&stored) && late.commit(&late.reserve(key(3))));
        let key_4 = [key(4)];
        let put = say::Put {
            namespace: NAMESPACE,
            after: None,
            keys: key_4.as_slice().into(),
            lens: Rows::from_iter([LEN.into()]),
        };
        let asked = late.begin(&put);
        assert_eq!(late.pin(key(2)).len(), 1);
        assert_eq!(held(&depot), (1, 2));
        lease.busy.store(true, Ordering::SeqCst);
        lease.over.store(true, Ordering::SeqCst);
        eventually("the fence", || lease.revoked.load(Ordering::SeqCst));
        // What it holds is still nobody else's: somebody moves for it.
        late.moved(&asked);
        assert!(!late.commit(&mine), "a late commit");
        assert_eq!(held(&depot).0, 1);
        lease.busy.store(false, Ordering::SeqCst);
        eventually("the end of what it held", || held(&depot) == (0, 0));
        let keys = [1, 2, 3, 4].map(key);
        let there = namespace.contains(&keys).unwrap();
        assert_eq!(there, [false, true, true, false]);
        // Another client's lease goes on, and the room is its to have.
        assert!(other.commit(&other.reserve(key(1))) && other.commit(&other.reserve(key(4))));
    }

    #[test]
    fn a_get_of_a_client_whose_lease_runs_out_lets_its_blocks_go() {
        let dir = tempfile::tempdir().unwrap();
        let (depot, lease, _) = serve(dir.path());
        let late = Peer::attach(&depot);
        assert!(late.commit(&late.reserve(key(1))));
        let key_1 = [key(1)];
        let get = say::Get {
            namespace: NAMESPACE,
            prefix: false,
            keys: key_1.as_slice().into(),
            lens: Rows::from_iter([LEN.into()]),
        };
        let asked = late.begin(&get);
        assert_eq!(held(&depot), (1, 0));
        lease.over.store(true, Ordering::SeqCst);
        eventually("the end of the get", || held(&depot) == (0, 0));
        assert!(
            lease.revoked.load(Ordering::SeqCst),
            "not before it was fenced"
        );
        late.moved(&asked);
    }

    #[test]
    fn a_client_that_has_ended_comes_back_as_another_one_whose_pins_hold() {
        let dir = tempfile::tempdir().unwrap();
        let (depot, lease, _) = serve(dir.path());
        let late = Peer::attach(&depot);
        assert!(late.commit(&late.reserve(key(1))));
        assert_eq!(late.pin(key(1)).len(), 1);
        lease.busy.store(true, Ordering::SeqCst);
        lease.over.store(true, Ordering::SeqCst);
        eventually("the fence", || lease.revoked.load(Ordering::SeqCst));
        let back = Peer::attach_as(&depot, late.number);
        assert_ne!(back.number, late.number);
        assert_eq!(back.pin(key(1)).len(), 1);
        lease.busy.store(false, Ordering::SeqCst);
        eventually("the end of what it held", || held(&depot).0 == 1);
        assert!(back.commit(&back.reserve(key(2))));
    }

    #[test]
    fn what_the_former_connection_has_heard_says_nothing_of_what_the_next_one_grants() {
        let dir = tempfile::tempdir().unwrap();
        let (depot, _, clients) = serve(dir.path());
        let peer = Peer::attach(&depot);
        assert!(peer.commit(&peer.reserve(key(1))));
        let former = Arc::clone(&clients.lock().sessions[&peer.number]);
        let next = Peer::attach_as(&depot, peer.number);
        assert_eq!(next.number, peer.number);
        assert_eq!(next.pin(key(1)).len(), 1);
        // A request that had reached the former one before.
        former.hear();
        assert_eq!(held(&depot).0, 1);
        let last = Peer::attach_as(&depot, peer.number);
        eventually("the end of what nobody has heard of", || {
            held(&depot).0 == 0
        });
        assert_eq!(last.number, peer.number);
    }
}
