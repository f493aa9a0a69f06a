//! Another host: what it is asked, whether it is there, and what it is owed.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::desk::Desk;
use super::messages::{Ask, Id, KEYS_MAX, Said, decode, encode};
use super::wire::Wire;
use crate::engine::Engine;
use crate::error::Error;
use crate::remote::Lender;

/// Threads that wait for one host.
const THREADS: usize = 2;

/// How long a host that does not answer is left alone at first, and at most.
const PAUSE_FIRST: Duration = Duration::from_millis(200);
const PAUSE_MOST: Duration = Duration::from_secs(10);

/// What all hosts are asked by.
pub(super) struct Net {
    pub(super) engine: Arc<Engine>,
    /// Half of how long a lookup may take, as it may ask two hosts, and of anything else.
    pub(super) lookup: Duration,
    pub(super) patience: Duration,
    pub(super) calls: AtomicU64,
    pub(super) unheard: AtomicU64,
    /// How often hosts have changed, or one has answered again.
    pub(super) changes: AtomicU64,
    next: AtomicU64,
}

impl Net {
    pub(super) fn new(engine: Arc<Engine>, lookup: Duration, patience: Duration) -> Net {
        Net {
            engine,
            lookup,
            patience,
            calls: AtomicU64::new(0),
            unheard: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            next: AtomicU64::new(1),
        }
    }

    /// The number of a call that may pin or reserve something.
    pub(super) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }
}

#[derive(Default)]
struct Down {
    /// When it is asked again whether it is there; none while it is.
    again: Option<Instant>,
    pause: Duration,
}

#[derive(Default)]
struct Owed {
    ids: Vec<Id>,
    calls: Vec<u64>,
    is_on_its_way: bool,
}

/// Another host.
pub(super) struct Target {
    pub(super) name: String,
    /// Whoever is at the address is asked: a worker knows no names, and what it asks for names the
    /// depot that has pinned it.
    is_anyone: bool,
    pub(super) address: SocketAddr,
    pub(super) net: Arc<Net>,
    pub(super) wire: Arc<Wire>,
    desk: Arc<Desk>,
    down: Mutex<Down>,
    is_down: AtomicBool,
    owed: Mutex<Owed>,
    /// Which of the processes that were met there has answered last; 0 before any.
    met: AtomicU32,
}

impl Target {
    pub(super) fn new(name: &str, address: SocketAddr, net: &Arc<Net>, wire: Arc<Wire>) -> Target {
        Target {
            name: name.to_owned(),
            is_anyone: false,
            address,
            net: Arc::clone(net),
            wire,
            desk: Desk::new("kvdepot-peer", THREADS),
            down: Mutex::default(),
            is_down: AtomicBool::new(false),
            owed: Mutex::default(),
            met: AtomicU32::new(0),
        }
    }

    /// Whoever is at an address.
    pub(super) fn anyone(address: SocketAddr, net: &Arc<Net>, wire: Arc<Wire>) -> Target {
        let name = address.to_string();
        Target {
            is_anyone: true,
            ..Target::new(&name, address, net, wire)
        }
    }

    /// Whether nothing is left that it has to be told.
    pub(super) fn owes_nothing(&self) -> bool {
        let owed = self.owed.lock();
        // A process that has gone needs no word.
        let nothing = owed.ids.is_empty() && owed.calls.is_empty();
        !owed.is_on_its_way && (nothing || self.is_down())
    }

    pub(super) fn is_down(&self) -> bool {
        self.is_down.load(Ordering::Acquire)
    }

    /// Asks, and has `then` run with the answer, in a thread of this host's; with none, at once
    /// while it is left alone.
    pub(super) fn ask(
        self: &Arc<Self>,
        ask: Ask,
        then: impl FnOnce(Option<(Said, Lender)>) + Send + 'static,
    ) {
        if self.is_down() {
            return then(None);
        }
        let target = Arc::clone(self);
        self.desk.run(move || then(target.hear(&ask)));
    }

    /// Asks, and waits for the answer.
    pub(super) fn hear(&self, ask: &Ask) -> Option<(Said, Lender)> {
        if self.is_down() {
            return None;
        }
        let limit = match ask {
            Ask::Contains(_) | Ask::Keeps(_) | Ask::Pin { .. } | Ask::Borrow { .. } => {
                self.net.lookup
            }
            _ => self.net.patience,
        };
        self.net.calls.fetch_add(1, Ordering::Relaxed);
        // Before it is asked anything: what another host reserves would be in that one's way.
        if self.met.load(Ordering::Acquire) == 0
            && let Err(error) = self.meet()
        {
            self.net.unheard.fetch_add(1, Ordering::Relaxed);
            self.leave_alone(&error);
            return None;
        }
        let said = self.net.engine.converse(self.address, encode(ask)?, limit);
        match said {
            Ok((said, lender)) => {
                let last = self.met.load(Ordering::Acquire);
                if last != lender.target() {
                    if let Err(error) = self.meet() {
                        self.undo(ask);
                        self.leave_alone(&error);
                        return None;
                    }
                    // It may have lost what it had.
                    self.net.changes.fetch_add(1, Ordering::AcqRel);
                }
                let heard = decode(&said);
                if let (None, Ask::Pin { call, .. } | Ask::Reserve { call, .. }) = (&heard, ask) {
                    self.owed.lock().calls.push(*call);
                }
                Some((heard?, lender))
            }
            Err(error) => {
                self.net.unheard.fetch_add(1, Ordering::Relaxed);
                // Its number may still be used by what it does later.
                if let Ask::Pin { call, .. } | Ask::Reserve { call, .. } = ask {
                    self.owed.lock().calls.push(*call);
                }
                self.leave_alone(&error);
                None
            }
        }
    }

    /// Meets the process that is there now: an error where that is no host, or another one, which
    /// has its address now.
    fn meet(&self) -> Result<(), Error> {
        let lost = |reason| Error::Unreachable {
            peer: self.address.to_string(),
            reason,
        };
        let ask = encode(&Ask::Name).ok_or_else(|| lost("cannot encode the request".to_owned()))?;
        let (engine, limit) = (&self.net.engine, self.net.lookup);
        let (said, lender) = engine.converse(self.address, ask, limit)?;
        match decode(&said) {
            Some(Said::Name(name)) if self.is_anyone || name == self.name => {
                self.met.store(lender.target(), Ordering::Release);
                Ok(())
            }
            Some(Said::Name(name)) => Err(lost(format!("it is now host {name:?}"))),
            _ => Err(lost("it did not report its host name".to_owned())),
        }
    }

    /// Another host may have answered, which pins and reserves nothing for this one.
    fn undo(&self, ask: &Ask) {
        let (Ask::Pin { call, .. } | Ask::Reserve { call, .. }) = ask else {
            return;
        };
        self.owed.lock().calls.push(*call);
        let word = encode(&Ask::Release {
            ids: Vec::new(),
            calls: vec![*call],
        });
        // As well as when it is asked again, which may be never.
        let _ended =
            word.map(|word| (self.net.engine).converse(self.address, word, self.net.lookup));
    }

    /// It does not answer, if that is the error: it is asked nothing until it does.
    fn leave_alone(&self, error: &Error) {
        if !matches!(error, Error::Unreachable { .. }) {
            return;
        }
        let mut down = self.down.lock();
        let was_there = down.again.is_none();
        if was_there {
            down.pause = PAUSE_FIRST;
        }
        down.again = Some(Instant::now() + jittered(down.pause));
        self.is_down.store(true, Ordering::Release);
        drop(down);
        if was_there {
            tracing::warn!(host = self.name, %error, "host unreachable; its blocks are misses");
        }
    }

    /// Looks whether it is back, where it is time for that, and says what it is owed.
    pub(super) fn look(self: &Arc<Self>, now: Instant) {
        {
            let mut down = self.down.lock();
            let Some(again) = down.again else {
                drop(down);
                return self.pay();
            };
            if now < again {
                return;
            }
            // Not once more before the answer is there.
            down.again = Some(now + PAUSE_MOST + self.net.patience);
        }
        let target = Arc::clone(self);
        self.desk.run(move || {
            let answer = target.net.engine.ping(target.address);
            let answer = answer.and_then(|()| target.meet());
            let mut down = target.down.lock();
            match answer {
                Ok(()) => {
                    down.again = None;
                    target.is_down.store(false, Ordering::Release);
                    target.net.changes.fetch_add(1, Ordering::AcqRel);
                    drop(down);
                    tracing::info!(host = target.name, "host reachable again");
                }
                Err(_) => {
                    down.pause = (down.pause * 2).min(PAUSE_MOST);
                    down.again = Some(Instant::now() + jittered(down.pause));
                }
            }
        });
    }

    /// A pin or a reservation is over.
    pub(super) fn release(self: &Arc<Self>, id: Id) {
        self.owed.lock().ids.push(id);
        self.pay();
    }

    /// Says what is over. What it does not hear is said again; it needs no word when all
    /// connections have ended, as it ends everything by itself then.
    fn pay(self: &Arc<Self>) {
        if self.is_down() {
            return;
        }
        {
            let mut owed = self.owed.lock();
            let nothing = owed.ids.is_empty() && owed.calls.is_empty();
            if nothing || std::mem::replace(&mut owed.is_on_its_way, true) {
                return;
            }
        }
        let target = Arc::clone(self);
        let runs = self.desk.run(move || {
            let (ids, calls) = {
                let mut owed = target.owed.lock();
                let ids = first_of(&mut owed.ids);
                (ids, first_of(&mut owed.calls))
            };
            let word = Ask::Release {
                ids: ids.clone(),
                calls: calls.clone(),
            };
            let heard = target.hear(&word).is_some();
            let mut owed = target.owed.lock();
            owed.is_on_its_way = false;
            if !heard {
                owed.ids.extend(ids);
                owed.calls.extend(calls);
            }
            drop(owed);
            if heard {
                target.pay();
            }
        });
        if !runs {
            self.owed.lock().is_on_its_way = false;
        }
    }

    pub(super) fn end(&self, deadline: Instant) {
        self.desk.end(deadline);
    }
}

/// Takes as many as one question may have.
fn first_of(owed: &mut Vec<u64>) -> Vec<u64> {
    let rest = owed.split_off(owed.len().min(KEYS_MAX));
    std::mem::replace(owed, rest)
}

/// A pause, a quarter longer or shorter.
fn jittered(pause: Duration) -> Duration {
    let part = crate::peer::random::<1>().map_or(128, |byte| u32::from(byte[0]));
    pause * 3 / 4 + pause * part / 512
}

/// What a host has pinned or reserved for this one; it is told when this is dropped.
pub(super) struct Far {
    pub(super) target: Arc<Target>,
    pub(super) id: Id,
    is_over: bool,
}

impl Far {
    pub(super) fn new(target: &Arc<Target>, id: Id) -> Far {
        Far {
            target: Arc::clone(target),
            id,
            is_over: false,
        }
    }

    /// It has ended there.
    pub(super) fn is_over(&mut self) {
        self.is_over = true;
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        if !self.is_over {
            self.target.release(self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_over_is_said_in_words_that_a_home_answers() {
        let mut owed: Vec<u64> = (0..=2 * KEYS_MAX as u64).collect();
        let all = owed.clone();
        let mut said = Vec::new();
        while !owed.is_empty() {
            let word = Ask::Release {
                ids: Vec::new(),
                calls: first_of(&mut owed),
            };
            assert!(word.is_bounded());
            if let Ask::Release { calls, .. } = word {
                said.extend(calls);
            }
        }
        assert_eq!(said, all);
    }
}
