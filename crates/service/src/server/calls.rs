//! The calls of a client, answered by its owner: index work, no bytes of blocks.

use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_arena::Error;
use kvdepot_media::Checksum;
use kvdepot_store::{About, Cursor, Key, NoRoom, PAGE_MAX, Reservation};
use serde::Deserialize;
use zerocopy::little_endian::U64;

use crate::frame::rows::{BlockRow, Files, GoneRow, Json, Name, NameRow, PlaceRow, mark, split};
use crate::frame::verbs::{self as say, Asks, Grant, Left, Page, Usage, Verb};
use crate::frame::{Frame, HEARD, Out};
use crate::line::incoming::Incoming;
use crate::server::holding::{Granted, Ticket};
use crate::server::session::Session;

/// Longest wait of one call: a client's thread sits on its connection meanwhile.
const WAIT_MAX: Duration = Duration::from_millis(50);

/// Most departures that are noted for one client, of all devices together: a frame holds as many.
const GONE_MAX: usize = 1 << 20;

/// Ends what the client has not heard of on the connections before, and answers calls until this
/// one ends, or has to.
pub(crate) fn run(session: &Arc<Session>, unheard: Vec<Ticket>, about: &About) {
    session.holding.give_back(&session.core, &unheard);
    drop(unheard);
    let (calls, socket) = (Calls { session, about }, &*session.calls);
    let mut incoming = Incoming::default();
    while let Ok(Some(request)) = incoming.next(socket) {
        if request.status == HEARD {
            session.hear();
        }
        // Of one that is served elsewhere by now, only what ends something.
        let ends = [Verb::Unpin, Verb::Abort, Verb::Dissolve, Verb::Commit];
        if !ends.contains(&request.verb) && session.is_former() {
            continue;
        }
        let mut granted = Granted::Nothing;
        let answer = match calls.answer(&request, &mut granted) {
            Ok(answer) => answer,
            Err(error) => Some(Out::refusal(request.verb, request.number, &error)),
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

/// Reads a call, and answers it with what `work` makes of it.
fn reply<'a, C: Asks + Deserialize<'a>>(
    request: &'a Frame,
    work: impl FnOnce(C) -> Result<C::Answer<'static>, Error>,
) -> Result<Option<Out>, Error> {
    let answer = work(request.read()?)?;
    Ok(Some(Out::answer::<C>(request.number, &answer)))
}

impl Calls<'_> {
    /// The answer, `None` for verbs that have none, and what the client gets by it. Every request
    /// is read to its end before anything is done: one that is malformed changes nothing.
    fn answer(&self, request: &Frame, granted: &mut Granted) -> Result<Option<Out>, Error> {
        let core = &self.session.core;
        let holding = &self.session.holding;
        if self.session.client.is_fenced() {
            // Its bytes may not have come where it says that they are.
            return Err(Error::Closed(""));
        }
        match request.verb {
            Verb::Namespace => reply(request, |call: say::Namespace<'_>| {
                let salt = call.salted.then_some(call.salt);
                core.describe(call.namespace, call.description, salt)
            }),
            Verb::Contains => reply(request, |call: say::Contains<'_>| {
                let found = core.contains(call.namespace, call.keys.allowed()?)?;
                Ok(found.into_iter().map(u8::from).collect())
            }),
            Verb::Prefix => reply(request, |call: say::Prefix<'_>| {
                Ok(core.prefix(call.namespace, call.keys.allowed()?)? as u64)
            }),
            Verb::Nearest => reply(request, |call: say::Nearest<'_>| {
                let tiers = core.nearest(call.namespace, call.keys.allowed()?)?;
                Ok(tiers.into_iter().map(mark).collect())
            }),
            Verb::Acknowledged => reply(request, |call: say::Acknowledged<'_>| {
                let lens = core.acknowledged(call.namespace, call.keys.allowed()?)?;
                let rows = lens.into_iter();
                let rows = rows.map(|len| len.map_or(0, |len| len.saturating_add(1)).into());
                Ok(rows.collect())
            }),
            Verb::Pin => reply(request, |call| self.pin(&call, granted)),
            Verb::Unpin => {
                let call: say::Unpin<'_> = request.read()?;
                let pins = holding.take_pins(core, &names(&call.names));
                core.unpin(&pins, call.served);
                Ok(None)
            }
            Verb::Discard => reply(request, |call: say::Discard<'_>| {
                let pins = holding.pins(core, &names(&call.names));
                Ok(core.discard(&pins) as u64)
            }),
            Verb::Reserve => reply(request, |call| self.reserve(&call, granted)),
            Verb::Commit => reply(request, |call| self.commit(&call)),
            Verb::Abort => {
                let call: say::Abort<'_> = request.read()?;
                let reservations = holding.take_reservations(&names(&call.names));
                let mine: Vec<Reservation> = reservations.into_iter().flatten().collect();
                core.abort(&mine);
                Ok(None)
            }
            Verb::Remove => reply(request, |call: say::Remove<'_>| {
                Ok(core.remove(call.namespace, call.keys.allowed()?)? as u64)
            }),
            Verb::Clear => reply(request, |call: say::Clear| {
                self.session.only_owner("clear")?;
                Ok(core.clear(call.namespace)? as u64)
            }),
            Verb::Group => reply(request, |call| holding.group(core, &call)),
            Verb::Dissolve => {
                let call: say::Dissolve = request.read()?;
                holding.dissolve(call.number);
                Ok(None)
            }
            _ => self.tell(request),
        }
    }

    /// As [`Calls::answer`], for what is asked about the depot as a whole.
    fn tell(&self, request: &Frame) -> Result<Option<Out>, Error> {
        let core = &self.session.core;
        match request.verb {
            Verb::Stats => reply(request, |_: say::Stats| Ok(Json(core.stats()))),
            Verb::About => reply(request, |_: say::About| Ok(Json(self.about.clone()))),
            Verb::Drain => reply(request, |call: say::Drain| {
                Ok(core.drain(Duration::from_millis(call.millis).min(WAIT_MAX)))
            }),
            Verb::Namespaces => reply(request, |call: say::Namespaces| {
                let page = core.namespace_page(call.after, PAGE_MAX)?;
                let usage = page.into_iter().map(|one| Usage {
                    namespace: one.id,
                    description: one.description,
                    blocks: one.blocks,
                    bytes: one.bytes,
                });
                Ok(usage.collect())
            }),
            Verb::Blocks => reply(request, |call: say::Blocks| {
                let from = call.from.as_ref().map(Cursor::from_bytes);
                let limit = (call.limit as usize).min(PAGE_MAX);
                let page = core.block_page(call.namespace, from, limit)?;
                let row = |(key, bytes): (_, u64)| BlockRow {
                    key,
                    bytes: bytes.into(),
                };
                Ok(Page {
                    next: page.next.map(Cursor::to_bytes),
                    blocks: page.blocks.into_iter().map(row).collect(),
                })
            }),
            Verb::Gone => reply(request, |call: say::Gone| {
                let holding = &self.session.holding;
                let each = GONE_MAX / core.media().len().max(1);
                let gone = || core.gone(holding.holder.seat, (call.limit as usize).min(each));
                // Later nobody would end what is noted for it.
                let gone = holding.while_here(gone).ok_or(Error::Closed(""))??;
                Ok(Left {
                    overflowed: gone.overflowed,
                    blocks: gone.blocks.iter().map(GoneRow::from).collect(),
                })
            }),
            verb => Err(Error::Peer {
                socket: String::new(),
                reason: format!(
                    "the request {verb:?} is not allowed on this connection; use the same release \
                     for client and server"
                ),
            }),
        }
    }

    fn pin(&self, call: &say::Pin<'_>, granted: &mut Granted) -> Result<Grant<'static>, Error> {
        let keys = call.keys.allowed()?;
        // Others have no key to a door.
        let through_doors = self.session.is_trusted;
        let core = &self.session.core;
        let caller = (self.session.holding.holder.seat, through_doors);
        let pins = core.pin_places(call.namespace, keys, call.prefix, caller)?;
        let marks = pins.iter().map(|pin| mark(pin.as_ref().map(|pin| pin.0)));
        let places = pins.iter().flatten();
        let files = places
            .clone()
            .map(|(tier, place)| core.outside_at(*tier, place));
        let grant = Grant {
            tiers: marks.collect(),
            places: places.map(|(_, place)| place.into()).collect(),
            files: Files::of(files),
        };
        *granted = Granted::Pins(pins);
        Ok(grant)
    }

    fn reserve(
        &self,
        call: &say::Reserve<'_>,
        granted: &mut Granted,
    ) -> Result<Grant<'static>, Error> {
        let no_room = match call.no_room {
            0 => NoRoom::Skip,
            1 => NoRoom::Fail,
            _ => NoRoom::Stop,
        };
        let keys = call.keys.allowed()?;
        check_one_each(keys.len(), call.parts.len())?;
        let lens = split(&call.parts, &call.lens)?;
        let lens = lens.map(|lens| lens.iter().copied().map(U64::get).collect());
        let blocks: Vec<_> = keys.iter().copied().zip(lens).collect();
        let holder = self.session.holding.holder;
        let after = call.after.map(Key);
        let reserved =
            self.session
                .core
                .reserve(holder, call.namespace, after, &blocks, no_room)?;
        let marks = reserved
            .iter()
            .map(|one| mark(one.as_ref().map(|one| one.tier)));
        let places = reserved
            .iter()
            .flatten()
            .map(|one| PlaceRow::from(&one.place));
        let files = reserved
            .iter()
            .flatten()
            .map(|one| one.place_outside().cloned());
        let grant = Grant {
            tiers: marks.collect(),
            places: places.collect(),
            files: Files::of(files),
        };
        *granted = Granted::Reservations(reserved.into_iter().flatten().collect());
        Ok(grant)
    }

    fn commit(
        &self,
        call: &say::Commit<'_>,
    ) -> Result<<say::Commit<'static> as Asks>::Answer<'static>, Error> {
        check_one_each(call.names.len(), call.parts.len())?;
        let checksums = split(&call.parts, &call.checksums)?;
        let holding = &self.session.holding;
        // From here on they are this call's to end or to give back.
        let taken = holding.take_reservations(&names(&call.names));
        let mut mine = Vec::new();
        let mut sums = Vec::new();
        for (reservation, checksums) in taken.iter().zip(checksums) {
            if let Some(reservation) = reservation {
                mine.push(reservation.clone());
                sums.push(checksums.iter().copied().map(Checksum).collect());
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
        let is_stored = |one: &Option<_>| one.is_some() && committed.next() == Some(true);
        Ok(taken.iter().map(is_stored).map(u8::from).collect())
    }
}

fn names(rows: &[NameRow]) -> Vec<Name> {
    rows.iter().copied().map(Name::from).collect()
}

/// Refuses lists of another number than what they are of.
fn check_one_each(of: usize, lists: usize) -> Result<(), Error> {
    match of == lists {
        true => Ok(()),
        false => Err(Error::Peer {
            socket: String::new(),
            reason: format!(
                "the request has {lists} lists for {of} entries; allowed: one list per entry"
            ),
        }),
    }
}
