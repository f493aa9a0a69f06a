//! Answers that an owner wrote and nobody read: what they granted is nobody's, and is given back.

use std::io::Write;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::frames::{
    self, Bare, GOODBYE, PIN, RESERVE, break_connections, frame, frame_with, read_frame, with_keys,
};
use crate::common::{Place, Served, assert_at_rest, eventually, key, keys, namespace, put};
use kvdepot_host::fds;
use kvdepot_store::{Depot, Error, Gone, interruptible};
use parking_lot::Mutex;

const LEN: usize = 5000;

/// Stands between clients and their owner, and lets answers to calls through until it is told not
/// to.
#[derive(Clone, Default)]
struct Between(Arc<State>);

#[derive(Default)]
struct State {
    sockets: Mutex<Vec<UnixStream>>,
    deaf: AtomicBool,
    /// How many bytes of the answers still get through then.
    passes: AtomicUsize,
    kept: AtomicUsize,
    /// How many clients still lose their connections as they take leave.
    rude: AtomicUsize,
}

impl Between {
    fn start(at: &Path, to: PathBuf) -> Between {
        let listener = UnixListener::bind(at).unwrap();
        let between = Between::default();
        let it = between.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = UnixStream::connect(&to) else {
                    return;
                };
                it.carry([client, server]);
            }
        });
        between
    }

    fn carry(&self, ends: [UnixStream; 2]) {
        let twins = || ends.each_ref().map(|end| end.try_clone().unwrap());
        self.0.sockets.lock().extend(twins());
        // Only the answers are many: a client's second connection comes with a role of its own.
        let is_calls = Arc::new(AtomicBool::new(false));
        for (which, [client, server]) in [twins(), twins()].into_iter().enumerate() {
            let (it, is_calls) = (self.clone(), Arc::clone(&is_calls));
            std::thread::spawn(move || match which {
                0 => pipe(&client, &server, |bytes| {
                    if bytes.starts_with(b"KVDATTCH") {
                        is_calls.store(bytes[12] == 2, Ordering::SeqCst);
                    }
                    match bytes.get(4..6) == Some(&GOODBYE.to_le_bytes()) && it.is_rude() {
                        true => 0,
                        false => bytes.len(),
                    }
                }),
                _ => pipe(&server, &client, |bytes| {
                    match is_calls.load(Ordering::SeqCst) {
                        true => it.lets_through(bytes.len()),
                        false => bytes.len(),
                    }
                }),
            });
        }
    }

    fn lets_through(&self, count: usize) -> usize {
        if !self.0.deaf.load(Ordering::SeqCst) {
            return count;
        }
        let passed = self.0.passes.load(Ordering::SeqCst).min(count);
        self.0.passes.fetch_sub(passed, Ordering::SeqCst);
        self.0.kept.fetch_add(count - passed, Ordering::SeqCst);
        passed
    }

    /// Whether this leave is not passed on; the connections are no more then.
    fn is_rude(&self) -> bool {
        let one_less = |left: usize| left.checked_sub(1);
        let rude = (self.0.rude).fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less);
        if rude.is_ok() {
            self.cut();
        }
        rude.is_ok()
    }

    /// Keeps the answers to itself from now on, but for so many bytes.
    fn keep_answers(&self, but: usize) {
        self.0.passes.store(but, Ordering::SeqCst);
        self.0.kept.store(0, Ordering::SeqCst);
        self.0.deaf.store(true, Ordering::SeqCst);
    }

    fn await_answer(&self) {
        let kept = || self.0.kept.load(Ordering::SeqCst) > 0;
        eventually("an answer", kept);
    }

    /// Ends all connections; the next ones are as they should be.
    fn cut(&self) {
        self.0.deaf.store(false, Ordering::SeqCst);
        for socket in self.0.sockets.lock().drain(..) {
            let _ended = socket.shutdown(Shutdown::Both);
        }
    }
}

fn pipe(from: &UnixStream, to: &UnixStream, passes: impl Fn(&[u8]) -> usize) {
    let mut bytes = vec![0; 64 << 10];
    loop {
        let (count, descriptors) = fds::recv(from, &mut bytes).unwrap_or_default();
        if count == 0 {
            let _ended = to.shutdown(Shutdown::Both);
            return;
        }
        let passes = passes(&bytes[..count]);
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        if passes > 0 && fds::send(to, &bytes[..passes], &descriptors).is_err() {
            let _ended = from.shutdown(Shutdown::Both);
        }
    }
}

/// An owner with three blocks, someone between, and a client.
fn meet(place: &Place) -> (Depot, Between, Depot) {
    let owner = place.serve();
    put(&namespace(&owner), &[1, 2, 3], LEN);
    let at = place.socket().with_extension("between");
    let between = Between::start(&at, place.socket());
    let client = kvdepot_service::connect(&at, Some(1)).unwrap();
    (owner, between, client)
}

/// Pins and reservations.
fn held(owner: &Depot) -> (u64, u64) {
    let tier = &owner.stats().tiers[0];
    (tier.pinned_blocks, tier.reserved_blocks)
}

#[test]
fn a_grant_whose_answer_was_not_heard_is_given_back_on_the_next_connection() {
    let place = Place::new("Dax", "", "4MiB");
    let (owner, between, client) = meet(&place);
    let ns = namespace(&client);
    let pins = ns.pin(&keys([1]), false).unwrap();
    let pins: Vec<_> = pins.into_iter().flatten().collect();
    let reserved = ns.reserve(&[(key(10), vec![LEN as u64])]).unwrap();
    let reserved: Vec<_> = reserved.into_iter().flatten().collect();
    assert_eq!(held(&owner), (1, 1));
    let wanted = [(key(11), vec![9]), (key(12), vec![1, 2])];
    // None of the answer, a part of its head, all but a part of it.
    for passes in [0, 7, 40] {
        for round in 0..2 {
            eventually("a connection", || client.is_connected());
            between.keep_answers(passes);
            std::thread::scope(|scope| {
                let call = scope.spawn(|| match round {
                    0 => ns.pin(&keys([1, 2, 3]), false).unwrap().len(),
                    _ => ns.reserve(&wanted).unwrap().len(),
                });
                between.await_answer();
                eventually("the grant", || held(&owner) == [(3, 1), (1, 3)][round]);
                between.cut();
                call.join().unwrap();
            });
            eventually("the end of what nobody knows", || held(&owner) == (1, 1));
        }
    }
    ns.unpin(&pins, true);
    ns.abort(&reserved);
    eventually("the end of all", || held(&owner) == (0, 0));
    assert_at_rest(&owner);
}

static PRESSED: AtomicBool = AtomicBool::new(false);

#[test]
fn what_an_interrupted_call_was_granted_is_given_back_where_its_answer_never_comes() {
    let place = Place::new("Dax", "", "4MiB");
    let (owner, between, client) = meet(&place);
    let ns = namespace(&client);
    between.keep_answers(0);
    let asked = std::thread::scope(|scope| {
        let call = scope.spawn(|| {
            let pressed = || PRESSED.load(Ordering::Relaxed);
            interruptible(pressed, || ns.pin(&keys([1, 2]), false))
        });
        between.await_answer();
        PRESSED.store(true, Ordering::Relaxed);
        call.join().unwrap()
    });
    assert!(matches!(asked, Err(Error::Interrupted)), "{asked:?}");
    assert!(client.is_connected());
    assert_eq!(held(&owner), (2, 0));
    // Another call follows it, which is answered no more either.
    std::thread::scope(|scope| {
        let call = scope.spawn(|| ns.reserve(&[(key(10), vec![9])]).unwrap());
        eventually("the grant", || held(&owner) == (2, 1));
        between.cut();
        assert!(call.join().unwrap().iter().all(Option::is_none));
    });
    eventually("the end of what nobody knows", || held(&owner) == (0, 0));
    assert_at_rest(&owner);
}

#[test]
fn a_client_that_closes_without_having_heard_leaves_nothing_held() {
    let place = Place::new("Dax", "", "4MiB");
    let (owner, between, client) = meet(&place);
    let ns = namespace(&client);
    between.keep_answers(0);
    std::thread::scope(|scope| {
        let call = scope.spawn(|| ns.pin(&keys([1, 2]), false).unwrap());
        between.await_answer();
        eventually("the grant", || held(&owner) == (2, 0));
        between.cut();
        client.close();
        assert!(call.join().unwrap().iter().all(Option::is_none));
    });
    eventually("the end of the pins", || held(&owner) == (0, 0));
    assert_at_rest(&owner);
}

#[test]
fn a_client_whose_connections_break_while_it_closes_leaves_nothing_held() {
    let place = Place::new("Dax", "", "4MiB");
    let (owner, between, client) = meet(&place);
    let pins = namespace(&client).pin(&keys([1, 2]), false).unwrap();
    assert_eq!(pins.iter().flatten().count(), 2);
    between.0.rude.store(2, Ordering::SeqCst);
    client.close();
    eventually("the end of the pins", || held(&owner) == (0, 0));
    assert_eq!(between.0.rude.load(Ordering::SeqCst), 0);
    // At any other moment.
    for round in 0..60 {
        let client = kvdepot_service::connect(&place.socket(), Some(1)).unwrap();
        let pins = namespace(&client).pin(&keys([1, 2]), false).unwrap();
        assert_eq!(pins.iter().flatten().count(), 2, "round {round}");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_micros(round * 7));
                break_connections(&place.socket());
            });
            client.close();
        });
        eventually("the end of the pins", || held(&owner) == (0, 0));
    }
}

#[test]
fn what_left_is_an_overflow_where_the_answer_that_said_it_was_not_heard() {
    let place = Place::new("Dax", "", "4MiB");
    let (owner, between, client) = meet(&place);
    assert_eq!(client.gone(100).unwrap(), Gone::default());
    assert_eq!(namespace(&owner).remove(&keys([1])).unwrap(), 1);
    between.keep_answers(0);
    std::thread::scope(|scope| {
        let call = scope.spawn(|| client.gone(100).unwrap());
        between.await_answer();
        between.cut();
        assert_eq!(call.join().unwrap(), Gone::default());
    });
    eventually("a connection", || client.is_connected());
    assert_eq!(namespace(&owner).remove(&keys([2])).unwrap(), 1);
    let gone = client.gone(100).unwrap();
    assert_eq!((gone.blocks.len(), gone.overflowed), (1, true));
    assert_eq!(client.gone(100).unwrap(), Gone::default());
}

#[test]
fn what_was_heard_is_what_the_client_says_of_it() {
    let place = Place::new("Dax", "", "4MiB");
    let owner = place.serve();
    put(&namespace(&owner), &[1, 2, 3], LEN);
    let id = namespace(&owner).id();
    let pin = |number, status, keys: &[u64]| {
        let keys: Vec<_> = keys.iter().map(|number| key(*number)).collect();
        frame_with(PIN, status, number, &with_keys(id, &[0], &keys))
    };
    let mut client = Bare::attach(&place.socket(), 0);
    for (number, keys) in [(1, &[1][..]), (2, &[1, 2]), (3, &[2, 3])] {
        client.calls.write_all(&pin(number, 0, keys)).unwrap();
    }
    eventually("the pins", || held(&owner) == (3, 0));
    // The second answer was the last that it has heard.
    let mut client = Bare::attach_again(&place.socket(), client.number, 2);
    eventually("the end of the third", || held(&owner) == (2, 0));
    // Whoever says with a call that all before was heard has heard it, whatever it says later.
    let next = [pin(4, 0, &[3]), pin(5, 1, &[2])].concat();
    client.calls.write_all(&next).unwrap();
    (4..6).for_each(|number| assert_eq!(read_frame(&client.calls).unwrap().2, number));
    let mut client = Bare::attach_again(&place.socket(), client.number, 2);
    // One more of the second block, from the fifth, is given back, and none of the third.
    let unpin =
        |blocks: &[Vec<u8>]| frame(6, 0, &[vec![0], frames::rows(&blocks.concat())].concat());
    let (_, answer) = client.ask(PIN, &with_keys(id, &[0], &[key(2)]));
    let name = frames::granted(&answer);
    client
        .calls
        .write_all(&unpin(&[name.clone(), name]))
        .unwrap();
    eventually("the end of the second block's pins", || {
        held(&owner) == (2, 0)
    });
    // A reservation that it never heard of is none.
    let body = frames::reserve(id, key(9), 100);
    client.calls.write_all(&frame(RESERVE, 7, &body)).unwrap();
    eventually("the reservation", || held(&owner) == (2, 1));
    let _client = Bare::attach_again(&place.socket(), client.number, 6);
    eventually("its end", || held(&owner) == (2, 0));
}
