//! The calls of a client, answered by its owner: index work, no bytes of blocks.

use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_arena::{Error, Identity, Key, NamespaceId, Place};
use kvdepot_store::{About, NoRoom, PAGE_MAX, Reservation};

use crate::frame::{self, Frame, HEARD, In, Incoming, Out, Verb};
use crate::holding::{Granted, Name, Ticket};
use crate::session::Session;

/// Longest wait of one call: a client's thread sits on its connection meanwhile.
const WAIT_MAX: Duration = Duration::from_millis(50);

/// Most departures that are noted for one client, of all devices together: a frame holds as many.
const GONE_MAX: usize = 1 << 20;

/// Ends what the client has not heard of on the connections before, and answers calls until this
/// one ends, or has to.
pub(crate) fn run(session: &Arc<Session>, unheard: Vec<Ticket>, about: &About) {
    session.holding.give_back(&session.core, &unheard);
    drop(unheard);
    let (calls, socket) = (Calls { session, about }, &session.calls);
    let mut incoming = Incoming::default();
    while let Ok(Some(request)) = incoming.next(socket) {
        if request.status == HEARD {
            session.holding.hear();
        }
        let mut granted = Granted::Nothing;
        let answer = match calls.answer(&request, &mut granted) {
            Ok(answer) => answer,
            Err(error) => Some(frame::refusal(request.verb, request.number, &error)),
        };
        if answer.is_some_and(|out| !session.answer(request.number, out, granted)) {
            // It says no more, but what it has said holds: it may have ended pins.
            let _shut = socket.shutdown(Shutdown::Both);
        }
    }
    // Whoever still waits for an answer learns it.
    let _shut = socket.shutdown(Shutdown::Both);
}

struct Calls<'a> {
    session: &'a Arc<Session>,
    about: &'a About,
}

impl Calls<'_> {
    /// The answer, `None` for verbs that have none, and what the client gets by it. Every request
    /// is read to its end before anything is done: one that is malformed changes nothing.
    fn answer(&self, request: &Frame, granted: &mut Granted) -> Result<Option<Out>, Error> {
        let mut body = In(&request.body);
        let mut out = Out::new(request.verb, request.number);
        let core = &self.session.core;
        let holding = &self.session.holding;
        match request.verb {
            Verb::Namespace => {
                let (id, text) = (body.namespace()?, body.text()?);
                body.end()?;
                core.describe(id, &text)?;
            }
            Verb::Contains => {
                let (id, keys) = keys_of(&mut body)?;
                let found = core.contains(id, &keys)?;
                found.iter().for_each(|found| out.flag(*found));
            }
            Verb::Prefix => {
                let (id, keys) = keys_of(&mut body)?;
                out.long(core.prefix(id, &keys)? as u64);
            }
            Verb::Nearest => {
                let (id, keys) = keys_of(&mut body)?;
                let tiers = core.nearest(id, &keys)?;
                for tier in tiers {
                    out.byte(tier.map_or(0, |tier| tier as u8 + 1));
                }
            }
            Verb::Pin => *granted = self.pin(&mut body, &mut out)?,
            Verb::Unpin => {
                let served = body.flag()?;
                let names = only_names(&mut body)?;
                let pins = holding.take_pins(core, &names);
                core.unpin(&pins, served);
                return Ok(None);
            }
            Verb::Discard => {
                let pins = holding.pins(core, &only_names(&mut body)?);
                out.long(core.discard(&pins) as u64);
            }
            Verb::Reserve => *granted = self.reserve(&mut body, &mut out)?,
            Verb::Commit => self.commit(&mut body, &mut out)?,
            Verb::Abort => {
                let names = only_names(&mut body)?;
                let reservations = holding.take_reservations(&names);
                let mine: Vec<Reservation> = reservations.into_iter().flatten().collect();
                core.abort(&mine);
                return Ok(None);
            }
            Verb::Remove => {
                let (id, keys) = keys_of(&mut body)?;
                out.long(core.remove(id, &keys)? as u64);
            }
            Verb::Clear => {
                let id = id_of(&mut body)?;
                self.session.only_owner("clear")?;
                out.long(core.clear(id)? as u64);
            }
            Verb::KeepContiguous => core.keep_contiguous(id_of(&mut body)?)?,
            Verb::Stats => out.json(&core.stats()),
            Verb::Drain => {
                let timeout = Duration::from_millis(body.long()?).min(WAIT_MAX);
                body.end()?;
                out.flag(core.drain(timeout));
            }
            Verb::Namespaces => {
                let after = body.flag()?.then(|| body.namespace()).transpose()?;
                body.end()?;
                let page = core.namespace_page(after, PAGE_MAX)?;
                out.word(page.len() as u32);
                for one in page {
                    out.bytes(&one.id.0);
                    out.long(one.blocks);
                    out.long(one.bytes);
                    out.flag(one.description.is_some());
                    out.text(one.description.as_deref().unwrap_or_default());
                }
            }
            Verb::Blocks => {
                let id = body.namespace()?;
                let from = body.flag()?.then(|| body.cursor()).transpose()?;
                let limit = body.long()? as usize;
                body.end()?;
                let page = core.block_page(id, from, limit.min(PAGE_MAX))?;
                out.flag(page.next.is_some());
                out.cursor(page.next.unwrap_or_default());
                out.reserve(page.blocks.len() * 40);
                out.word(page.blocks.len() as u32);
                for (key, bytes) in page.blocks {
                    out.bytes(&key.0);
                    out.long(bytes);
                }
            }
            Verb::Gone => {
                let limit = body.long()? as usize;
                body.end()?;
                let each = GONE_MAX / core.media().len().max(1);
                let gone = || core.gone(holding.holder.seat, limit.min(each));
                // Later nobody would end what is noted for it.
                let gone = holding.while_here(gone).ok_or(Error::Closed(""))??;
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

    fn pin(&self, body: &mut In<'_>, out: &mut Out) -> Result<Granted, Error> {
        let (id, prefix) = (body.namespace()?, body.flag()?);
        let keys = body.keys()?;
        body.end()?;
        let pins = self.session.core.pin_places(id, &keys, prefix)?;
        out.reserve(pins.len() * 56);
        for pin in &pins {
            let Some((tier, place)) = pin else {
                out.byte(0);
                continue;
            };
            out.byte(*tier as u8 + 1);
            out.place(place);
        }
        Ok(Granted::Pins(pins))
    }

    fn reserve(&self, body: &mut In<'_>, out: &mut Out) -> Result<Granted, Error> {
        let id = body.namespace()?;
        let no_room = match body.byte()? {
            0 => NoRoom::Skip,
            1 => NoRoom::Fail,
            _ => NoRoom::Stop,
        };
        let keys = body.keys()?;
        let mut blocks = Vec::with_capacity(keys.len());
        for key in keys {
            let parts = body.count(8)?;
            let lens = (0..parts).map(|_| body.long());
            blocks.push((key, lens.collect::<Result<Vec<u64>, Error>>()?));
        }
        body.end()?;
        let holder = self.session.holding.holder;
        let reserved = self.session.core.reserve(holder, id, &blocks, no_room)?;
        out.word(reserved.len() as u32);
        for reservation in &reserved {
            let Some(reservation) = reservation else {
                out.byte(0);
                continue;
            };
            out.byte(reservation.tier as u8 + 1);
            out.place(&reservation.place);
        }
        let reserved = reserved.into_iter().flatten().collect();
        Ok(Granted::Reservations(reserved))
    }

    fn commit(&self, body: &mut In<'_>, out: &mut Out) -> Result<(), Error> {
        let holding = &self.session.holding;
        let names = names(body)?;
        let mut checksums = Vec::with_capacity(names.len());
        for _ in &names {
            let parts = body.count(16)?;
            let sums = (0..parts).map(|_| body.checksum());
            checksums.push(sums.collect::<Result<Vec<_>, Error>>()?);
        }
        body.end()?;
        // From here on they are this call's to end or to give back.
        let taken = holding.take_reservations(&names);
        let mut mine = Vec::new();
        let mut sums = Vec::new();
        for (reservation, checksums) in taken.iter().zip(checksums) {
            if let Some(reservation) = reservation {
                mine.push(reservation.clone());
                sums.push(checksums);
            }
        }
        let core = &self.session.core;
        let committed = match core.commit(&mine, &sums) {
            Ok(committed) => committed,
            Err(error) => {
                self.session.put_back(mine);
                return Err(error);
            }
        };
        let mut committed = committed.into_iter();
        for reservation in &taken {
            out.flag(reservation.is_some() && committed.next() == Some(true));
        }
        Ok(())
    }
}

/// Pins or reservations as a client names them.
fn names(body: &mut In<'_>) -> Result<Vec<Name>, Error> {
    let name = |body: &mut In<'_>| Ok((usize::from(body.byte()?), body.token()?));
    (0..body.count(17)?).map(|_| name(body)).collect()
}

/// As [`names`], with nothing behind them.
fn only_names(body: &mut In<'_>) -> Result<Vec<Name>, Error> {
    let names = names(body)?;
    body.end().map(|()| names)
}

/// What a call is about that names a namespace, and nothing else.
fn id_of(body: &mut In<'_>) -> Result<NamespaceId, Error> {
    let id = body.namespace()?;
    body.end().map(|()| id)
}

/// What a call is about that names keys of a namespace, and nothing else.
fn keys_of(body: &mut In<'_>) -> Result<(NamespaceId, Vec<Key>), Error> {
    let (id, keys) = (body.namespace()?, body.keys()?);
    body.end().map(|()| (id, keys))
}

/// Names a pin or reservation for its owner.
pub(crate) fn put_name(out: &mut Out, tier: usize, place: &Place) {
    out.byte(tier as u8);
    out.token(place.token);
}

/// Whether an answer may grant something.
pub(crate) fn grants(answer: &Frame) -> bool {
    answer.status == 0 && matches!(answer.verb, Verb::Pin | Verb::Reserve)
}

/// What gives back that which a late answer grants: nobody waits for it any more.
pub(crate) fn give_back_late(answer: &Frame) -> Option<Out> {
    let mut body = In(&answer.body);
    let pins = answer.verb == Verb::Pin;
    if !grants(answer) {
        return None;
    }
    if !pins {
        body.word().ok()?;
    }
    let mut granted = Vec::new();
    while body.end().is_err() {
        let Some(tier) = usize::from(body.byte().ok()?).checked_sub(1) else {
            continue;
        };
        // Whatever its identity is: its name does without.
        let identity = Identity {
            namespace: NamespaceId([0; 16]),
            key: Key([0; 32]),
        };
        granted.push((tier, body.place(identity).ok()?));
    }
    (!granted.is_empty()).then(|| match pins {
        true => give_back_pins(&granted),
        false => about_names(Out::new(Verb::Abort, 0), &granted),
    })
}

/// Ends pins whose bytes were not used.
pub(crate) fn give_back_pins(pins: &[(usize, Place)]) -> Out {
    about_names(unpin(false), pins)
}

/// What begins the end of pins, whose names follow.
pub(crate) fn unpin(served: bool) -> Out {
    let mut out = Out::new(Verb::Unpin, 0);
    out.flag(served);
    out
}

/// A call about pins or reservations, which end it.
pub(crate) fn about_names(mut out: Out, names: &[(usize, Place)]) -> Out {
    out.word(names.len() as u32);
    for (tier, place) in names {
        put_name(&mut out, *tier, place);
    }
    out
}

/// A call about a namespace, which is what it begins with.
pub(crate) fn of_namespace(verb: Verb, number: u64, id: NamespaceId) -> Out {
    let mut out = Out::new(verb, number);
    out.bytes(&id.0);
    out
}
