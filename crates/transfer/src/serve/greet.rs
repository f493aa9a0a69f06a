//! Whether a connection is somebody's who has the token, and whose.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use zerocopy::{FromZeros, IntoBytes};

use super::House;
use super::served::Served;
use super::session::Session;
use crate::peer::{prepare, random};
use crate::socket;
use crate::wire::{Challenge, Greeting, Hello, MAC, Proof, Turn};

/// How long a connection that is one too many is listened to.
const REFUSAL: Duration = Duration::from_millis(100);

/// Greets; `None` where the connection is to end.
pub(super) fn greet(house: &House, served: &Arc<Served>) -> Option<(Arc<Session>, u32)> {
    let greeted = exchange(house, served);
    if greeted.is_none() {
        house.counts.greetings.fetch_add(1, Ordering::Relaxed);
    }
    greeted
}

fn exchange(house: &House, served: &Arc<Served>) -> Option<(Arc<Session>, u32)> {
    let socket = &served.socket;
    prepare(socket).ok()?;
    let by = Instant::now() + house.terms.timeout;
    socket.set_write_timeout(Some(house.terms.timeout)).ok()?;
    let mut hello = Hello::new_zeroed();
    socket::receive_by(socket, hello.as_mut_bytes(), by).ok()?;
    let mut greeting = hello.greet().ok()?;
    if house.is_closing.load(Ordering::Acquire) {
        greeting = Greeting::Closing;
    }
    let challenge = challenge(house, greeting)?;
    socket::send(socket.as_fd(), challenge.as_bytes()).ok()?;
    if greeting != Greeting::GoOn {
        return None;
    }
    let proof = Proof {
        key: &house.terms.key,
        hello: &hello,
        challenge: &challenge,
    };
    let mut theirs = [0; MAC];
    socket::receive_by(socket, &mut theirs, by).ok()?;
    if !proof.proves(Turn::Initiator, &[], theirs) {
        tracing::warn!(peer = ?socket.peer_addr().ok(), "a connection with another token is refused");
        return None;
    }
    let session = house.session(hello.engine);
    let lane = hello.lane.get();
    session.enter(lane, served);
    let mine = proof.mac(Turn::Target, &theirs);
    let ready = socket::send(socket.as_fd(), &mine).and_then(|()| {
        socket.set_read_timeout(None)?;
        socket.set_write_timeout(None)
    });
    if ready.is_err() {
        session.leave(lane, served);
        return None;
    }
    Some((session, lane))
}

fn challenge(house: &House, greeting: Greeting) -> Option<Challenge> {
    let nonce = random().ok()?;
    Some(Challenge::new(
        greeting,
        house.terms.credit,
        house.terms.engine,
        nonce,
    ))
}

/// Tells a connection that it is one too many. In the listener's thread: it waits for next to
/// nothing.
pub(super) fn refuse(house: &House, served: &Served) {
    let tell = || -> io::Result<()> {
        let socket = &served.socket;
        socket.set_write_timeout(Some(REFUSAL))?;
        let mut hello = Hello::new_zeroed();
        let by = Instant::now() + REFUSAL;
        socket::receive_by(socket, hello.as_mut_bytes(), by)?;
        match challenge(house, Greeting::TooMany) {
            Some(challenge) => socket::send(socket.as_fd(), challenge.as_bytes()),
            None => Ok(()),
        }
    };
    // Who does not hear it sees the connection end.
    drop(tell());
}
