//! Whether a connection is somebody's who has the token, and whose.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::House;
use super::served::Served;
use super::session::Session;
use crate::peer::greeted;
use crate::tls::Failure;
use crate::wire::Greeting;

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
    let line = &served.line;
    let timeout = house.terms.shake.timeout;
    line.set_write_timeout(Some(timeout)).ok()?;
    let greeting = match house.is_closing.load(Ordering::Acquire) {
        true => Greeting::Closing,
        false => Greeting::GoOn,
    };
    let mut entered = None;
    let terms = (greeting, house.terms.credit);
    let (fd, by) = (line.as_fd(), Instant::now() + timeout);
    let welcomed = greeted(fd, &house.terms.shake, terms, by, |hello| {
        let session = house.session(hello.engine);
        let lane = hello.lane.get();
        session.enter(lane, served);
        entered = Some((session, lane));
    });
    let ready = welcomed.and_then(|()| line.set_write_timeout(None));
    match ready {
        Ok(()) => entered,
        Err(error) => {
            if let Some((session, lane)) = entered {
                house.leave(&session, lane, served);
            }
            let error = match line.failure() {
                Some(Failure::Refused(why) | Failure::Lost(why)) => why,
                None => error.to_string(),
            };
            tracing::warn!(peer = %line.peer(), %error, "a connection is not greeted");
            None
        }
    }
}

/// Tells a connection that it is one too many. In the listener's thread: it waits for next to
/// nothing.
pub(super) fn refuse(house: &House, served: &Served) {
    let tell = || -> io::Result<()> {
        let line = &served.line;
        line.set_write_timeout(Some(REFUSAL))?;
        let terms = (Greeting::TooMany, house.terms.credit);
        let by = Instant::now() + REFUSAL;
        greeted(line.as_fd(), &house.terms.shake, terms, by, |_| ())
    };
    // Who does not hear it sees the connection end.
    drop(tell());
}
