//! Keeps this host registered: a lease, renewed in time, and the key that hangs on it.

use std::time::Duration;

use super::super::status::Standing;
use super::backoff::Backoff;
use super::gateway::Failure;
use super::messages::{grant, granted, header, is_alive, lease, succeeded};
use super::shared::Shared;
use crate::homes::Host;

/// Longest pause after a failure: an etcd that is back is found that soon.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// How often a key that others write at the same time is tried at once.
const TRIES: usize = 3;

/// A lease, and whether the key as it is now hangs on it.
#[derive(Default)]
struct Hold {
    lease: Option<String>,
    written: Option<Host>,
}

pub(super) fn run(shared: &Shared) {
    let beat = shared.ttl / 3;
    let mut hold = Hold::default();
    let mut backoff = Backoff::new(beat.min(PAUSE_MAX));
    while !shared.is_closing() {
        let pause = match turn(shared, &mut hold) {
            Ok(()) => {
                backoff.reset();
                beat
            }
            Err(Failure::Closed) => break,
            Err(failure) => {
                shared.board.trouble(&failure.to_string());
                backoff.wait()
            }
        };
        shared.sleep_unless_poked(pause);
    }
    if let Some(id) = hold.lease {
        // Without an answer others hear of it when the lease has run out.
        let _left = shared.gateway.post_last("/v3/lease/revoke", &lease(&id));
    }
}

/// Does what is due: asks whether etcd is there, or renews the lease, or takes one, and writes the
/// key where it is not as it should be.
fn turn(shared: &Shared, hold: &mut Hold) -> Result<(), Failure> {
    let Some(own) = shared.own() else {
        // The watcher relies on somebody finding out that the endpoint hangs.
        let count = shared.keys.count();
        return shared.gateway.post("/v3/kv/range", &count).map(drop);
    };
    if let Some(id) = &hold.lease {
        let answer = shared.gateway.post("/v3/lease/keepalive", &lease(id))?;
        if !is_alive(&answer) {
            tracing::warn!(
                name = own.name,
                "etcd lease of this host expired; registering the host again"
            );
            lose(shared, hold);
        }
    }
    if shared.take_poke() {
        hold.written = None;
    }
    if hold.written.as_ref() == Some(&own) {
        return Ok(());
    }
    match register(shared, hold, &own) {
        // Between being kept alive and being used it has run out.
        Err(Failure::NotFound(_)) => {
            lose(shared, hold);
            register(shared, hold, &own)
        }
        done => done,
    }
}

fn lose(shared: &Shared, hold: &mut Hold) {
    *hold = Hold::default();
    shared.set_registered(None);
    shared.board.stand(Standing::Joining);
}

/// Writes the key, unless a later process has the name.
fn register(shared: &Shared, hold: &mut Hold, own: &Host) -> Result<(), Failure> {
    for _ in 0..TRIES {
        let answer = shared
            .gateway
            .post("/v3/kv/range", &shared.keys.get(&own.name))?;
        let (header_seen, entries) = shared.keys.listed(&answer);
        let seen = entries.first();
        let host = seen.and_then(|entry| entry.host.as_ref());
        let own = &drawn(own, host, header_seen.revision);
        if let Some(other) = host.filter(|other| other.incarnation > own.incarnation) {
            displaced(shared, hold, other);
            return Ok(());
        }
        let id = match &hold.lease {
            Some(id) => id.clone(),
            None => take_lease(shared, hold)?,
        };
        let is_there = seen.is_some_and(|entry| entry.lease == id) && host == Some(own);
        if is_there {
            registered(shared, hold, own, header_seen.revision);
            return Ok(());
        }
        let put = shared
            .keys
            .put(own, &id, seen.map_or(0, |entry| entry.mod_revision));
        let answer = shared.gateway.post("/v3/kv/txn", &put)?;
        if succeeded(&answer) {
            registered(shared, hold, own, header(&answer).revision);
            return Ok(());
        }
    }
    let reason = format!(
        "host {}: another process writes the etcd key of the same host name; give each host its \
         own name",
        own.name
    );
    Err(Failure::Refused(reason))
}

/// With an incarnation, where it has none yet: later than any that was written by now, whatever the
/// clocks of their hosts say.
fn drawn(own: &Host, other: Option<&Host>, revision: i64) -> Host {
    let known = other.map_or(0, |other| other.incarnation);
    let incarnation = match own.incarnation {
        0 => known.max(revision.unsigned_abs()).saturating_add(1),
        given => given,
    };
    Host {
        incarnation,
        ..own.clone()
    }
}

fn registered(shared: &Shared, hold: &mut Hold, own: &Host, revision: i64) {
    hold.written = Some(own.clone());
    shared.set_incarnation(own.incarnation);
    shared.set_registered(Some(revision));
    shared.board.stand(Standing::Joined);
}

fn take_lease(shared: &Shared, hold: &mut Hold) -> Result<String, Failure> {
    let answer = shared
        .gateway
        .post("/v3/lease/grant", &grant(shared.ttl.as_secs()))?;
    let id = granted(&answer)
        .ok_or_else(|| Failure::Refused("etcd granted a lease without an ID".to_owned()))?;
    hold.lease = Some(id.clone());
    Ok(id)
}

/// Stays out, and looks again with the next turn.
fn displaced(shared: &Shared, hold: &mut Hold, other: &Host) {
    *hold = Hold::default();
    shared.set_registered(None);
    shared.board.stand(Standing::Displaced);
    shared.board.trouble(&format!(
        "another process uses the host name {}, at {}, incarnation {}",
        other.name, other.address, other.incarnation
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_later_of_two_processes_has_the_higher_incarnation() {
        let host = |incarnation| Host {
            name: "a".to_owned(),
            address: "127.0.0.1:1".to_owned(),
            capacity: 1,
            incarnation,
        };
        let first = drawn(&host(0), None, 10);
        // It was written by then, and its key may be gone.
        let second = drawn(&host(0), None, 11);
        assert!(second.incarnation > first.incarnation);
        assert!(drawn(&host(0), Some(&host(1 << 60)), 12).incarnation > 1 << 60);
        assert_eq!(drawn(&second, Some(&host(1 << 60)), 13), second);
    }
}
