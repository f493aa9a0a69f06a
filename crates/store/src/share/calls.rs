//! The calls of a client, answered by its owner: index work, no bytes of blocks.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use super::frame::{self, Frame, In, Incoming, Out, Verb};
use super::session::Session;
use crate::arena::{Place, Token};
use crate::depot::About;
use crate::pipeline::{Pin, Reservation};
use crate::{Error, NamespaceId};

/// Longest wait of one call: a client's thread sits on its connection meanwhile.
const WAIT_MAX: Duration = Duration::from_millis(50);

/// Most departures of a device that are noted for one client.
const GONE_MAX: usize = 1 << 20;

/// Answers calls until the connection ends.
pub(super) fn run(session: &Arc<Session>, socket: &UnixStream, about: &About) {
    let calls = Calls { session, about };
    let mut incoming = Incoming::default();
    while let Ok(Some(request)) = incoming.next(socket) {
        let answer = match calls.answer(&request) {
            Ok(None) => None,
            Ok(Some(out)) => Some(out),
            Err(error) => Some(frame::refusal(request.verb, request.number, &error)),
        };
        if let Some(out) = answer
            && out.send(socket).is_err()
        {
            return;
        }
    }
}

struct Calls<'a> {
    session: &'a Arc<Session>,
    about: &'a About,
}

impl Calls<'_> {
    /// The answer; `None` for verbs that have none.
    fn answer(&self, request: &Frame) -> Result<Option<Out>, Error> {
        let mut body = In(&request.body);
        let mut out = Out::new(request.verb, request.number);
        let core = &self.session.core;
        match request.verb {
            Verb::Namespace => {
                let id = body.namespace()?;
                core.describe(id, &body.text()?)?;
            }
            Verb::Contains => {
                let id = body.namespace()?;
                let found = core.contains(id, &body.keys()?)?;
                found.iter().for_each(|found| out.flag(*found));
            }
            Verb::Prefix => {
                let id = body.namespace()?;
                out.long(core.prefix(id, &body.keys()?)? as u64);
            }
            Verb::Nearest => {
                let id = body.namespace()?;
                let tiers = core.nearest(id, &body.keys()?)?;
                for tier in tiers {
                    out.byte(tier.map_or(0, |tier| tier as u8 + 1));
                }
            }
            Verb::Pin => self.pin(&mut body, &mut out)?,
            Verb::Unpin => {
                let served = body.flag()?;
                let pins = self.take_pins(&mut body)?;
                core.unpin(&pins, served);
                return Ok(None);
            }
            Verb::Discard => {
                let pins = self.known_pins(&mut body)?;
                out.long(core.discard(&pins) as u64);
            }
            Verb::Reserve => self.reserve(&mut body, &mut out)?,
            Verb::Commit => self.commit(&mut body, &mut out)?,
            Verb::Abort => {
                let reservations = self.take_reservations(&mut body)?;
                let mine: Vec<Reservation> = reservations.into_iter().flatten().collect();
                core.abort(&mine);
                return Ok(None);
            }
            Verb::Remove => {
                let id = body.namespace()?;
                out.long(core.remove(id, &body.keys()?)? as u64);
            }
            Verb::Clear => out.long(core.clear(body.namespace()?)? as u64),
            Verb::KeepContiguous => core.keep_contiguous(body.namespace()?)?,
            Verb::Stats => out.json(&core.stats()),
            Verb::Drain => {
                let timeout = Duration::from_millis(body.long()?).min(WAIT_MAX);
                out.flag(core.ledger.drain(timeout));
            }
            Verb::Namespaces => {
                let all = core.namespaces()?;
                out.word(all.len() as u32);
                for one in all {
                    out.bytes(&one.id.0);
                    out.long(one.blocks);
                    out.long(one.bytes);
                    out.flag(one.description.is_some());
                    out.text(one.description.as_deref().unwrap_or_default());
                }
            }
            Verb::Blocks => {
                let blocks = core.blocks(body.namespace()?)?;
                out.reserve(blocks.len() * 40);
                out.word(blocks.len() as u32);
                for (key, bytes) in blocks {
                    out.bytes(&key.0);
                    out.long(bytes);
                }
            }
            Verb::Gone => {
                let limit = body.long()? as usize;
                let gone = core.gone(self.session.number, limit.min(GONE_MAX))?;
                out.flag(gone.overflowed);
                out.word(gone.blocks.len() as u32);
                for (identity, bytes) in gone.blocks {
                    out.bytes(&identity.namespace.0);
                    out.bytes(&identity.key.0);
                    out.long(bytes);
                }
            }
            Verb::About => out.json(self.about),
            verb => {
                return Err(Error::Peer {
                    socket: String::new(),
                    reason: format!("{verb:?} is no call"),
                });
            }
        }
        body.end()?;
        Ok(Some(out))
    }

    fn pin(&self, body: &mut In<'_>, out: &mut Out) -> Result<(), Error> {
        let (id, prefix) = (body.namespace()?, body.flag()?);
        let keys = body.keys()?;
        let core = &self.session.core;
        let pins = core.pin_places(id, &keys, prefix)?;
        let mut held = self.session.held.lock();
        if held.over {
            drop(held);
            for (tier, place) in pins.into_iter().flatten() {
                core.tiers[tier].unpin([place.token].into_iter());
            }
            return Err(Error::Closed(""));
        }
        out.reserve(pins.len() * 56);
        held.pins.reserve(pins.len());
        for pin in &pins {
            let Some((tier, place)) = pin else {
                out.byte(0);
                continue;
            };
            let entry = held.pins.entry((*tier, place.token));
            entry.or_insert((0, *place)).0 += 1;
            out.byte(*tier as u8 + 1);
            out.place(place);
        }
        Ok(())
    }

    /// Pins that the client names, which are its own no more.
    fn take_pins(&self, body: &mut In<'_>) -> Result<Vec<Pin>, Error> {
        let mut held = self.session.held.lock();
        let mut pins = Vec::new();
        for _ in 0..body.count(17)? {
            let name = name(body)?;
            let Some((count, place)) = held.pins.get_mut(&name) else {
                continue;
            };
            *count -= 1;
            pins.push(self.session.pin(name.0, *place));
            if *count == 0 {
                held.pins.remove(&name);
            }
        }
        Ok(pins)
    }

    fn known_pins(&self, body: &mut In<'_>) -> Result<Vec<Pin>, Error> {
        let held = self.session.held.lock();
        let mut pins = Vec::new();
        for _ in 0..body.count(17)? {
            let name = name(body)?;
            if let Some((_, place)) = held.pins.get(&name) {
                pins.push(self.session.pin(name.0, *place));
            }
        }
        Ok(pins)
    }

    fn reserve(&self, body: &mut In<'_>, out: &mut Out) -> Result<(), Error> {
        let (id, strict) = (body.namespace()?, body.flag()?);
        let keys = body.keys()?;
        let mut blocks = Vec::with_capacity(keys.len());
        for key in keys {
            let parts = body.count(8)?;
            let lens = (0..parts).map(|_| body.long());
            blocks.push((key, lens.collect::<Result<Vec<u64>, Error>>()?));
        }
        let core = &self.session.core;
        let reserved = core.reserve(self.session.depot, id, &blocks, strict)?;
        let mut held = self.session.held.lock();
        if held.over {
            let mine: Vec<Reservation> = reserved.into_iter().flatten().collect();
            drop(held);
            core.abort(&mine);
            return Err(Error::Closed(""));
        }
        for reservation in reserved {
            let Some(reservation) = reservation else {
                out.byte(0);
                continue;
            };
            out.byte(reservation.tier as u8 + 1);
            out.place(&reservation.place);
            let name = (reservation.tier, reservation.place.token);
            held.reservations.insert(name, reservation);
        }
        Ok(())
    }

    /// Reservations that the client names, which are its own no more; `None` for those it has not.
    fn take_reservations(&self, body: &mut In<'_>) -> Result<Vec<Option<Reservation>>, Error> {
        let count = body.count(17)?;
        let names = (0..count).map(|_| name(body));
        let names = names.collect::<Result<Vec<_>, Error>>()?;
        let mut held = self.session.held.lock();
        let taken = names.iter().map(|name| held.reservations.remove(name));
        Ok(taken.collect())
    }

    fn commit(&self, body: &mut In<'_>, out: &mut Out) -> Result<(), Error> {
        let taken = self.take_reservations(body)?;
        let mut checksums = Vec::with_capacity(taken.len());
        for _ in &taken {
            let parts = body.count(16)?;
            let sums = (0..parts).map(|_| body.checksum());
            checksums.push(sums.collect::<Result<Vec<_>, Error>>()?);
        }
        let mut mine = Vec::new();
        let mut sums = Vec::new();
        for (reservation, checksums) in taken.iter().zip(checksums) {
            if let Some(reservation) = reservation {
                mine.push(reservation.clone());
                sums.push(checksums);
            }
        }
        let committed = self.session.core.commit(&mine, &sums);
        if committed.is_err() {
            // Still the client's to abort.
            let mut held = self.session.held.lock();
            for reservation in mine {
                let name = (reservation.tier, reservation.place.token);
                held.reservations.insert(name, reservation);
            }
        }
        let mut committed = committed?.into_iter();
        for reservation in &taken {
            out.flag(reservation.is_some() && committed.next() == Some(true));
        }
        Ok(())
    }
}

/// A pin or reservation as a client names it.
fn name(body: &mut In<'_>) -> Result<(usize, Token), Error> {
    let tier = usize::from(body.byte()?);
    Ok((tier, body.token()?))
}

/// Names a pin or reservation for its owner.
pub(super) fn put_name(out: &mut Out, tier: usize, place: &Place) {
    out.byte(tier as u8);
    out.token(place.token);
}

/// A call about a namespace, which is what it begins with.
pub(super) fn of_namespace(verb: Verb, number: u64, id: NamespaceId) -> Out {
    let mut out = Out::new(verb, number);
    out.bytes(&id.0);
    out
}
