//! The hosts as etcd says, followed from a list through its events. Knows no sockets.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::messages::{Entry, Header};
use crate::homes::{Host, View, ViewError};

/// The hosts, as of a revision.
#[derive(Debug, Default)]
pub(super) struct Roster {
    header: Header,
    hosts: BTreeMap<String, Host>,
    /// Hosts that an etcd without its memory does not know, until this moment.
    missed: BTreeMap<String, Host>,
    until: Option<Instant>,
}

impl Roster {
    pub(super) fn revision(&self) -> i64 {
        self.header.revision
    }

    /// Whether an answer is of another history than what is known: another cluster, or one that has
    /// not come as far.
    pub(super) fn is_of_another_history(&self, header: &Header) -> bool {
        let known = &self.header;
        known.revision > 0 && (header.revision < known.revision || header.cluster != known.cluster)
    }

    /// Takes a list in the place of all that is known. Whom another history does not have may have
    /// had no time yet to register there: such hosts stay for that long.
    pub(super) fn list(
        &mut self,
        header: Header,
        entries: Vec<Entry>,
        now: Instant,
        grace: Duration,
    ) {
        let old = std::mem::take(&mut self.hosts);
        if self.is_of_another_history(&header) {
            self.missed.extend(old);
            self.until = Some(now + grace);
        }
        self.header = header;
        for entry in entries {
            self.write(entry);
        }
    }

    /// Takes what happened since.
    pub(super) fn follow(&mut self, header: Header, events: Vec<Result<Entry, String>>) {
        for event in events {
            match event {
                Ok(entry) => self.write(entry),
                Err(name) => {
                    self.hosts.remove(&name);
                    self.missed.remove(&name);
                }
            }
        }
        self.header = header;
    }

    fn write(&mut self, entry: Entry) {
        self.missed.remove(&entry.name);
        match entry.host {
            Some(host) => drop(self.hosts.insert(entry.name, host)),
            None => {
                let name = entry.name.as_str();
                tracing::warn!(
                    name,
                    "invalid value in a host's etcd key; the host is ignored"
                );
                self.hosts.remove(name);
            }
        }
    }

    /// Lets go whoever has had the time to register again, and has not; answers how long that is
    /// not to be asked again.
    pub(super) fn let_go(&mut self, now: Instant) -> Option<Duration> {
        let left = self.until?.checked_duration_since(now);
        let left = left.filter(|left| !left.is_zero() && !self.missed.is_empty());
        if left.is_none() {
            self.missed.clear();
            self.until = None;
        }
        left
    }

    /// Whether a host is registered by this incarnation.
    pub(super) fn has(&self, name: &str, incarnation: u64) -> bool {
        let host = self.hosts.get(name);
        host.is_some_and(|host| host.incarnation == incarnation)
    }

    pub(super) fn view(&self) -> Result<View, ViewError> {
        let hosts = self.hosts.values().chain(self.missed.values());
        View::new(
            self.header.revision.max(1).unsigned_abs(),
            hosts.cloned().collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str) -> Entry {
        let host = Host {
            name: name.into(),
            address: String::new(),
            capacity: 1,
            incarnation: 7,
        };
        Entry {
            name: name.into(),
            host: Some(host),
            lease: "1".into(),
            mod_revision: 1,
        }
    }

    fn header(cluster: &str, revision: i64) -> Header {
        Header {
            cluster: cluster.into(),
            revision,
        }
    }

    fn names(roster: &Roster) -> Vec<String> {
        let view = roster.view().unwrap();
        view.hosts().iter().map(|host| host.name.clone()).collect()
    }

    const GRACE: Duration = Duration::from_secs(5);

    #[test]
    fn hosts_come_and_go_by_events() {
        let (mut roster, now) = (Roster::default(), Instant::now());
        roster.list(header("c", 5), vec![entry("a"), entry("b")], now, GRACE);
        assert_eq!(
            (names(&roster), roster.revision()),
            (vec!["a".into(), "b".into()], 5)
        );
        assert!(roster.has("a", 7) && !roster.has("a", 8) && !roster.has("c", 7));
        let other = Entry {
            host: None,
            ..entry("b")
        };
        roster.follow(
            header("c", 8),
            vec![Ok(entry("c")), Err("a".into()), Ok(other)],
        );
        assert_eq!(
            (names(&roster), roster.view().unwrap().epoch()),
            (vec!["c".into()], 8)
        );
        // What has been missed meanwhile has gone.
        roster.list(header("c", 9), vec![entry("d")], now, GRACE);
        assert_eq!(
            (names(&roster), roster.let_go(now)),
            (vec!["d".into()], None)
        );
    }

    #[test]
    fn whom_an_etcd_without_its_memory_does_not_know_stays_for_a_while() {
        let now = Instant::now();
        for (cluster, revision) in [("c", 3), ("other", 900)] {
            let mut roster = Roster::default();
            roster.list(
                header("c", 50),
                vec![entry("a"), entry("b"), entry("c")],
                now,
                GRACE,
            );
            assert!(roster.is_of_another_history(&header(cluster, revision)));
            roster.list(header(cluster, revision), vec![entry("a")], now, GRACE);
            assert_eq!(names(&roster), ["a", "b", "c"]);
            let later = header(cluster, revision + 1);
            roster.follow(later.clone(), vec![Ok(entry("b"))]);
            assert_eq!(names(&roster), ["a", "b", "c"]);
            assert_eq!(roster.let_go(now), Some(GRACE));
            // A list of the same history lets nobody go before.
            roster.list(later, vec![entry("a"), entry("b")], now, GRACE);
            assert_eq!(names(&roster), ["a", "b", "c"]);
            assert_eq!(roster.let_go(now + GRACE), None);
            assert_eq!(names(&roster), ["a", "b"]);
        }
    }
}
