//! Looking blocks up: all keys of one host by one question, two hosts at most for a key, this one's
//! own share without any.

use std::collections::HashMap;
use std::sync::Arc;

use kvdepot_arena::{Identity, Key, NamespaceId, Place, Token};
use kvdepot_media::Checksum;
use kvdepot_store::Reply;

use super::Common;
use super::desk::gather;
use super::held::{Held, Own, Pinned, Site, Span, read_tail};
use super::hosts::Whom;
use super::messages::{Ask, Id, KEYS_MAX, Keys, Said};
use super::share::{OWN, Share};
use super::target::{Far, Target};
use super::wire::{Line, Lines};
use crate::grant::Rights;
use crate::remote::Lender;

/// Something that hosts are asked of keys.
trait Question: Send + Sync + 'static {
    type Answer: Send + 'static;

    /// `at`: the indices of these keys in the call.
    fn own(&self, common: &Common, keys: &[Key], at: &[usize]) -> Vec<Option<Self::Answer>>;

    fn ask(&self, keys: Keys, call: u64, at: &[usize]) -> Ask;

    /// What another host has said of keys; `None` for what makes no sense.
    fn read(
        &self,
        common: &Common,
        target: &Arc<Target>,
        said: (Said, Lender),
        keys: &[Key],
    ) -> Option<Vec<Option<Self::Answer>>>;
}

/// What follows a lookup.
type Done<T> = Box<dyn FnOnce(Vec<Option<T>>) + Send>;

/// A lookup under way.
struct Look<Q: Question> {
    common: Arc<Common>,
    question: Arc<Q>,
    namespace: NamespaceId,
    keys: Vec<Key>,
    /// Who is asked for each, one after the other.
    whom: Vec<Vec<Whom>>,
    answers: Vec<Option<Q::Answer>>,
}

impl<Q: Question> Look<Q> {
    fn begin(
        common: &Arc<Common>,
        question: Q,
        (namespace, keys): (NamespaceId, &[Key]),
        done: impl FnOnce(Vec<Option<Q::Answer>>) + Send + 'static,
    ) {
        let names: Vec<Identity> = keys
            .iter()
            .map(|key| Identity {
                namespace,
                key: *key,
            })
            .collect();
        let look = Look {
            common: Arc::clone(common),
            question: Arc::new(question),
            namespace,
            keys: keys.to_vec(),
            whom: common.hosts.to_ask(names.iter()),
            answers: (0..keys.len()).map(|_| None).collect(),
        };
        look.round(0, Box::new(done));
    }

    /// Asks the hosts whose turn it is, and then the next ones for what is still missing.
    fn round(mut self, turn: usize, done: Done<Q::Answer>) {
        let mut groups: HashMap<usize, (Whom, Vec<usize>)> = HashMap::new();
        let mut has_more = false;
        for (at, whom) in self.whom.iter().enumerate() {
            if self.answers[at].is_none()
                && let Some(one) = whom.get(turn)
            {
                let group = groups.entry(one.number());
                group
                    .or_insert_with(|| (one.clone(), Vec::new()))
                    .1
                    .push(at);
                has_more |= whom.len() > turn + 1;
            }
        }
        let mut asked = Vec::new();
        for (whom, at) in groups.into_values() {
            match whom {
                Whom::Own => {
                    let keys: Vec<Key> = at.iter().map(|at| self.keys[*at]).collect();
                    let found = self.question.own(&self.common, &keys, &at);
                    at.into_iter()
                        .zip(found)
                        .for_each(|(at, found)| self.answers[at] = found);
                }
                Whom::Far(target) => {
                    let parts = at.chunks(KEYS_MAX);
                    asked.extend(parts.map(|part| (Arc::clone(&target), part.to_vec())));
                }
            }
        }
        let (common, question) = (Arc::clone(&self.common), Arc::clone(&self.question));
        let (namespace, keys) = (self.namespace, self.keys.clone());
        let parts: Vec<Vec<usize>> = asked.iter().map(|(_, part)| part.clone()).collect();
        let next = move |found: Vec<Option<Vec<Option<Q::Answer>>>>| {
            for (part, found) in parts.into_iter().zip(found) {
                let found = found.into_iter().flatten();
                part.into_iter()
                    .zip(found)
                    .for_each(|(at, found)| self.answers[at] = found);
            }
            match has_more {
                true => self.round(turn + 1, done),
                false => done(self.answers),
            }
        };
        for (slot, (target, part)) in gather(asked.len(), next).into_iter().zip(asked) {
            let call = common.hosts.net().number();
            let named: Vec<Key> = part.iter().map(|at| keys[*at]).collect();
            let ask = question.ask(Keys::new(namespace, named.iter().copied()), call, &part);
            let (common, question) = (Arc::clone(&common), Arc::clone(&question));
            let asked = Arc::clone(&target);
            target.ask(ask, move |said| {
                let found = said.and_then(|said| question.read(&common, &asked, said, &named));
                slot.say(found);
            });
        }
    }
}

struct Probe(NamespaceId);

impl Question for Probe {
    type Answer = ();

    fn own(&self, common: &Common, keys: &[Key], _at: &[usize]) -> Vec<Option<()>> {
        let found = common.share.contains(self.0, keys).into_iter();
        found.map(|found| found.then_some(())).collect()
    }

    fn ask(&self, keys: Keys, _call: u64, _at: &[usize]) -> Ask {
        Ask::Contains(keys)
    }

    fn read(
        &self,
        _common: &Common,
        _target: &Arc<Target>,
        (said, _): (Said, Lender),
        keys: &[Key],
    ) -> Option<Vec<Option<()>>> {
        match said {
            Said::Flags(flags) if flags.len() == keys.len() => {
                Some(flags.into_iter().map(|flag| flag.then_some(())).collect())
            }
            _ => None,
        }
    }
}

pub(super) fn probe(
    common: &Arc<Common>,
    namespace: NamespaceId,
    keys: &[Key],
    reply: Reply<Vec<bool>>,
) {
    Look::begin(common, Probe(namespace), (namespace, keys), |found| {
        reply.answer(found.iter().map(Option::is_some).collect());
    });
}

/// A pin of which nobody has been told yet; dropped, it is over.
pub(super) struct Told {
    held: Arc<Held>,
    place: Option<Place>,
}

impl Told {
    fn new(held: &Arc<Held>, place: Place, pinned: Pinned) -> Told {
        Told {
            held: Arc::clone(held),
            place: Some(held.pin(place, pinned)),
        }
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        if let Some(place) = self.place.take() {
            self.held.unpin(&[place]);
        }
    }
}

struct Pin {
    namespace: NamespaceId,
    /// The stamps of all keys, or none where they are not used.
    used: Vec<u64>,
    /// Bytes of MACs behind each part.
    macs: usize,
}

impl Pin {
    fn used_at(&self, at: &[usize]) -> Vec<u64> {
        at.iter()
            .filter_map(|at| self.used.get(*at).copied())
            .collect()
    }
}

/// A block of this host's share that is pinned, with what stands behind its payload; `None` where
/// that does not fit.
pub(super) fn own_pin(
    share: &Arc<Share>,
    stored: Place,
    (name, macs): (Identity, usize),
) -> Option<(Place, Pinned)> {
    let own = Own::new(share, stored);
    let mut place = Place::of(name);
    let table = match stored.parts {
        1 => 0,
        _ => kvdepot_arena::parts::ENTRY,
    };
    let len = u64::from(stored.parts) * (table + macs as u64);
    let tail = share.tail(own.place(), len)?;
    // Other processes find it there.
    place.extents = stored.extents;
    let (table, macs) = read_tail(
        &mut place,
        (stored.len, stored.parts),
        stored.checksum,
        &tail,
        macs,
    )?;
    let site = Site::Here(own);
    Some((place, Pinned { site, table, macs }))
}

impl Question for Pin {
    type Answer = Told;

    fn own(&self, common: &Common, keys: &[Key], at: &[usize]) -> Vec<Option<Told>> {
        let used = self.used_at(at);
        let found = common
            .share
            .pin((OWN, &used), self.namespace, keys)
            .into_iter()
            .zip(keys);
        let told = |(stored, key): (Option<Place>, &Key)| {
            let name = Identity {
                namespace: self.namespace,
                key: *key,
            };
            let (place, pinned) = own_pin(&common.share, stored?, (name, self.macs))?;
            Some(Told::new(&common.held, place, pinned))
        };
        found.map(told).collect()
    }

    fn ask(&self, keys: Keys, call: u64, at: &[usize]) -> Ask {
        Ask::Pin {
            keys,
            call,
            macs: self.macs as u8,
            used: self.used_at(at),
        }
    }

    fn read(
        &self,
        common: &Common,
        target: &Arc<Target>,
        (said, lender): (Said, Lender),
        keys: &[Key],
    ) -> Option<Vec<Option<Told>>> {
        let Said::Pinned(all) = said else {
            return None;
        };
        // Each is held from here on, whatever else is wrong.
        let far = |pin: &super::messages::Pinned| Far::new(target, pin.id);
        let all: Vec<_> = all
            .into_iter()
            .map(|pin| pin.map(|pin| (far(&pin), pin)))
            .collect();
        if all.len() != keys.len() {
            return None;
        }
        let told = |(pin, key): (Option<(Far, super::messages::Pinned)>, &Key)| {
            let (far, pin) = pin?;
            let mut place = Place::of(Identity {
                namespace: self.namespace,
                key: *key,
            });
            let stored = (pin.len, pin.parts);
            let sum = Checksum(pin.checksum);
            let (table, macs) = read_tail(&mut place, stored, sum, &pin.tail, self.macs)?;
            let remote = lender.lent(pin.grant, pin.len, Rights::READ);
            let lines = Lines::new(vec![Line::There(remote)], place.len);
            let site = Site::There(Span::new(&target.wire, lines), far);
            Some(Told::new(&common.held, place, Pinned { site, table, macs }))
        };
        Some(all.into_iter().zip(keys).map(told).collect())
    }
}

pub(super) fn pin(
    common: &Arc<Common>,
    namespace: NamespaceId,
    (keys, used): (&[Key], &[u64]),
    reply: Reply<Vec<Option<Place>>>,
) {
    let macs = common.held.macs_of(namespace);
    let pin = Pin {
        namespace,
        used: used.to_vec(),
        macs,
    };
    Look::begin(common, pin, (namespace, keys), |found| {
        let places = found.into_iter().map(|told| told?.place.take());
        reply.answer(places.collect());
    });
}

/// Where a pin that did not verify is.
enum Wrong {
    Here(Token),
    There(Arc<Target>, Id),
}

pub(super) fn discard(common: &Arc<Common>, places: &[Place], reply: Reply<usize>) {
    let mut own: Vec<Token> = Vec::new();
    let mut far: HashMap<usize, (Arc<Target>, Vec<Id>)> = HashMap::new();
    for place in places {
        let wrong = common.held.site(place, |site| match site {
            Site::Here(own) => Wrong::Here(own.place().token),
            Site::There(_, far) => Wrong::There(Arc::clone(&far.target), far.id),
        });
        match wrong {
            Some(Wrong::Here(token)) => own.push(token),
            Some(Wrong::There(target, id)) => {
                let at = Arc::as_ptr(&target).addr();
                far.entry(at)
                    .or_insert_with(|| (target, Vec::new()))
                    .1
                    .push(id);
            }
            None => {}
        }
    }
    let count = common.share.arena().discard(&own);
    let mut asked: Vec<(Arc<Target>, Vec<Id>)> = Vec::new();
    for (target, ids) in far.into_values() {
        let some = ids.chunks(KEYS_MAX).map(<[Id]>::to_vec);
        asked.extend(some.map(|some| (Arc::clone(&target), some)));
    }
    let done = move |said: Vec<Option<usize>>| {
        if let Some(said) = said.into_iter().collect::<Option<Vec<_>>>() {
            reply.answer(count + said.into_iter().sum::<usize>());
        }
    };
    for (slot, (target, ids)) in gather(asked.len(), done).into_iter().zip(asked) {
        target.ask(Ask::Discard(ids), move |said| {
            slot.say(match said {
                Some((Said::Count(count), _)) => Some(count as usize),
                _ => None,
            });
        });
    }
}
