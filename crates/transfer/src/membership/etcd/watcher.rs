//! Follows the hosts, and publishes each new view.

use std::time::{Duration, Instant};

use super::backoff::{Backoff, jittered};
use super::gateway::Failure;
use super::messages::Watched;
use super::roster::Roster;
use super::shared::Shared;

/// Longest life of one watch: a connection that a box on the way has forgotten without a word ends
/// then. The next one goes on where it ended.
const LIFE: Duration = Duration::from_secs(60);
/// How many watches in a row go without a list: whatever was missed by a fault is made good then.
const WATCHES: u32 = 10;
/// Longest pause after a failure.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Shortest life of one watch: what begins shall be heard before it ends.
const LIFE_MIN: Duration = Duration::from_secs(1);

/// Why a watch has ended, without a failure.
enum End {
    /// It goes on from where it was.
    Again,
    /// All hosts are to be listed.
    List,
}

pub(super) fn run(shared: &Shared) {
    let mut roster = Roster::default();
    let mut backoff = Backoff::new((shared.ttl / 3).min(PAUSE_MAX));
    let (mut must_list, mut watches) = (true, 0);
    while !shared.is_closing() {
        let (was_listed, began) = (must_list, Instant::now());
        let done = match must_list {
            true => list(shared, &mut roster),
            false => Ok(()),
        };
        let heard = done.and_then(|()| watch(shared, &mut roster, was_listed, &mut backoff));
        match heard {
            Ok(End::Again) => {
                watches = if was_listed { 1 } else { watches + 1 };
                must_list = watches >= WATCHES;
                // An etcd that ends each watch is not asked all the time.
                if began.elapsed() < LIFE_MIN {
                    shared.sleep(backoff.wait());
                }
            }
            Ok(End::List) => must_list = true,
            Err(Failure::Closed) => return,
            Err(failure) => {
                shared.board.unheard(&failure.to_string());
                let left = roster.let_go(Instant::now());
                let wait = backoff.wait();
                shared.sleep(left.map_or(wait, |left| wait.min(left)));
            }
        }
    }
}

fn list(shared: &Shared, roster: &mut Roster) -> Result<(), Failure> {
    let answer = shared.gateway.post("/v3/kv/range", &shared.keys.list())?;
    let (header, entries) = shared.keys.listed(&answer);
    if header.revision == 0 {
        return Err(Failure::Refused(
            "etcd returned a list without a revision".to_owned(),
        ));
    }
    if roster.is_of_another_history(&header) {
        tracing::warn!("etcd data was reset; waiting for hosts to register again");
    }
    // A keeper finds out within a third of a lease, and may wait as long after a failure.
    let grace = shared.ttl + shared.ttl / 3;
    roster.list(header, entries, Instant::now(), grace);
    publish(shared, roster)
}

/// Reads a watch to its end.
fn watch(
    shared: &Shared,
    roster: &mut Roster,
    was_listed: bool,
    backoff: &mut Backoff,
) -> Result<End, Failure> {
    let left = roster.let_go(Instant::now());
    publish(shared, roster)?;
    let life = jittered(LIFE);
    let life = left.map_or(life, |left| life.min(left.max(LIFE_MIN)));
    let from = shared.keys.watch(roster.revision() + 1);
    let mut stream = shared.gateway.stream("/v3/watch", &from, life)?;
    let mut is_heard = false;
    while let Some(answer) = stream.next().inspect_err(|_| stream.leave())? {
        match shared.keys.watched(&answer) {
            Some(Watched::Created(header)) => {
                // A member that lags behind the list is waited for: the same history it is.
                if !was_listed && roster.is_of_another_history(&header) {
                    return Ok(End::List);
                }
                is_heard = true;
                backoff.reset();
                shared.board.heard();
            }
            Some(Watched::Events(header, events)) => {
                roster.follow(header, events);
                publish(shared, roster)?;
            }
            Some(Watched::Compacted) => return Ok(End::List),
            Some(Watched::Canceled(reason)) => {
                stream.leave();
                return Err(Failure::Refused(reason));
            }
            None => {}
        }
    }
    match is_heard {
        true => Ok(End::Again),
        false => {
            stream.leave();
            Err(Failure::Unreachable(
                "the watch ended before it started".to_owned(),
            ))
        }
    }
}

fn publish(shared: &Shared, roster: &Roster) -> Result<(), Failure> {
    let view = roster.view();
    shared
        .board
        .publish(view.map_err(|error| Failure::Refused(error.to_string()))?);
    shared.check_registered(roster.revision(), |own| {
        roster.has(&own.name, own.incarnation)
    });
    Ok(())
}
