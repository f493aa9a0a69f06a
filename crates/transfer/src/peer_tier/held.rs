//! What this host's depot has pinned and reserved, here and at other hosts, by the tokens that the
//! pipeline knows.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvdepot_arena::held::turn_len;
use kvdepot_arena::parts::{self, Part};
use kvdepot_arena::{Arena, Error, NamespaceId, Place, Reserved, TakesBack, Token};
use kvdepot_media::{Buffer, Carrier, Checksum, Mac};
use kvdepot_store::{DoorKey, Ends, Keyring, Outside, Proof};
use parking_lot::Mutex;

use super::messages::{Said, Why};
use super::pass::Pass;
use super::share::Share;
use super::target::Far;
use super::wire::{Lines, Wire};
use crate::grant::Rights;
use crate::remote::{Lender, Remote};

/// Bytes of a MAC.
pub(super) const MAC: usize = 16;

/// What is held, by token.
pub(super) struct Held {
    number: u32,
    keys: Option<Arc<Keyring>>,
    share: Arc<Share>,
    pass: Pass,
    key: Mutex<DoorKey>,
    entries: Mutex<HashMap<u64, What>>,
    next: AtomicU64,
}

enum What {
    Pinned(Pinned),
    New(New),
}

/// A pinned block of this host's share.
pub(super) struct Own {
    share: Arc<Share>,
    place: Place,
}

impl Own {
    pub(super) fn new(share: &Arc<Share>, place: Place) -> Own {
        Own {
            share: Arc::clone(share),
            place,
        }
    }

    pub(super) fn place(&self) -> &Place {
        &self.place
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.share.unpin(self.place.token);
    }
}

/// Addresses of a carrier, as long as this lives.
pub(super) struct Span {
    wire: Arc<Wire>,
    base: u64,
    pub(super) lines: Arc<Lines>,
}

impl Span {
    pub(super) fn new(wire: &Arc<Wire>, lines: Lines) -> Span {
        let (base, lines) = wire.add(lines);
        Span {
            wire: Arc::clone(wire),
            base,
            lines,
        }
    }

    /// A range of them.
    pub(super) fn buffer(&self, offset: u64, len: u64, writable: bool) -> Buffer {
        let carrier = Arc::clone(&self.wire) as Arc<dyn Carrier>;
        let at = (self.base + offset) as usize;
        Buffer::carried(carrier, at, len as usize, writable)
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        self.wire.remove(self.base);
    }
}

/// Where a pinned block is.
pub(super) enum Site {
    Here(Own),
    There(Span, Far),
}

/// A pinned block, with what stands behind its payload.
pub(super) struct Pinned {
    pub(super) site: Site,
    pub(super) table: Vec<u8>,
    pub(super) macs: Vec<Mac>,
}

/// A copy of a block that is being written.
pub(super) enum Copy {
    Here(Reserved),
    There(Far),
}

/// A copy that a block has room for, and its bytes' way there.
pub(super) type Room = (Copy, Option<Remote>);

impl Copy {
    /// The same for copies of the same host.
    pub(super) fn whose(&self) -> usize {
        match self {
            Copy::Here(_) => 0,
            Copy::There(far) => Arc::as_ptr(&far.target).addr(),
        }
    }

    /// Its name at its home; nought for this host's own.
    pub(super) fn id(&self) -> u64 {
        match self {
            Copy::Here(_) => 0,
            Copy::There(far) => far.id,
        }
    }
}

/// A block that is being written.
pub(super) struct New {
    pub(super) copies: Vec<Copy>,
    /// None where the only copy is this host's own.
    pub(super) span: Option<Span>,
    pub(super) table: Vec<u8>,
    pub(super) macs: Vec<Mac>,
}

impl Held {
    pub(super) fn new(
        number: u32,
        keys: Option<Arc<Keyring>>,
        share: &Arc<Share>,
        pass: Pass,
    ) -> Arc<Held> {
        Arc::new(Held {
            number,
            keys,
            share: Arc::clone(share),
            key: Mutex::new(pass.key()),
            pass,
            entries: Mutex::default(),
            next: AtomicU64::new(1),
        })
    }

    /// Hands this token to workers that attach from now on.
    pub(super) fn renew(&self, token: Vec<u8>) {
        let pass = Pass {
            token,
            ..self.pass.clone()
        };
        *self.key.lock() = pass.key();
    }

    /// Bytes of MACs behind each part of a block of this namespace.
    pub(super) fn macs_of(&self, namespace: NamespaceId) -> usize {
        let keys = self.keys.as_ref();
        keys.and_then(|keys| keys.of(namespace)).map_or(0, |_| MAC)
    }

    /// A token that names nothing.
    pub(super) fn nowhere(&self) -> Token {
        Token {
            device: self.number,
            slot: 0,
            sequence: 0,
        }
    }

    fn add(&self, mut place: Place, what: What) -> Place {
        place.token = Token {
            sequence: self.next.fetch_add(1, Ordering::Relaxed),
            ..self.nowhere()
        };
        self.entries.lock().insert(place.token.sequence, what);
        place
    }

    pub(super) fn pin(&self, place: Place, pinned: Pinned) -> Place {
        self.add(place, What::Pinned(pinned))
    }

    pub(super) fn reserve(self: &Arc<Self>, place: Place, new: New) -> Reserved {
        let place = self.add(place, What::New(new));
        Reserved::new(Arc::clone(self) as Arc<dyn TakesBack>, place)
    }

    pub(super) fn unpin(&self, places: &[Place]) {
        self.end(places.iter().map(|place| place.token.sequence));
    }

    /// Ends what has these names. Other threads get the lock after each turn.
    fn end(&self, names: impl Iterator<Item = u64>) {
        let mut names = names.peekable();
        while names.peek().is_some() {
            let some: Vec<u64> = names.by_ref().take(turn_len()).collect();
            let mut ended = Vec::with_capacity(some.len());
            let mut entries = self.entries.lock();
            ended.extend(some.iter().filter_map(|name| entries.remove(name)));
            drop(entries);
            // Without the lock: a pin at another host is released there.
            drop(ended);
        }
    }

    /// What a reservation has, which ends.
    pub(super) fn take(&self, place: &Place) -> Option<New> {
        let mut entries = self.entries.lock();
        match entries.remove(&place.token.sequence)? {
            What::New(new) => Some(new),
            What::Pinned(_) => None,
        }
    }

    /// What was reserved is published, and pinned under the same token.
    pub(super) fn published(&self, place: &Place, pinned: Pinned) {
        let what = What::Pinned(pinned);
        self.entries.lock().insert(place.token.sequence, what);
    }

    /// What a pin is of: a token of this host's share, or a name at another host.
    pub(super) fn site<R>(&self, place: &Place, with: impl FnOnce(&Site) -> R) -> Option<R> {
        let entries = self.entries.lock();
        match entries.get(&place.token.sequence)? {
            What::Pinned(pinned) => Some(with(&pinned.site)),
            What::New(_) => None,
        }
    }

    pub(super) fn close(&self) {
        let left = std::mem::take(&mut *self.entries.lock());
        drop(left);
    }

    fn note(&self, place: &Place, note: impl FnOnce(&mut New)) -> Result<(), Error> {
        let mut entries = self.entries.lock();
        match entries.get_mut(&place.token.sequence) {
            Some(What::New(new)) => {
                note(new);
                Ok(())
            }
            _ => Err(Error::Closed(
                "the block was released before it was written",
            )),
        }
    }
}

impl TakesBack for Held {
    fn take_back(&self, token: Token) {
        let gone = self.entries.lock().remove(&token.sequence);
        drop(gone);
    }
}

impl Ends for Held {
    fn buffers(
        &self,
        place: &Place,
        offset: u64,
        len: u64,
        ends: &mut Vec<Buffer>,
    ) -> Result<(), Error> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= place.len);
        if !inside {
            return Err(Error::input("len", len, "a range within the block"));
        }
        ends.clear();
        let entries = self.entries.lock();
        let (own, span, writable) = match entries.get(&place.token.sequence) {
            Some(What::Pinned(Pinned {
                site: Site::Here(own),
                ..
            })) => (Some(&own.place), None, false),
            Some(What::Pinned(Pinned {
                site: Site::There(span, _),
                ..
            })) => (None, Some(span), false),
            Some(What::New(new)) => match (&new.span, new.copies.first()) {
                (Some(span), _) => (None, Some(span), true),
                (None, Some(Copy::Here(reserved))) => (Some(&**reserved), None, true),
                _ => (None, None, true),
            },
            None => (None, None, false),
        };
        if let Some(span) = span {
            ends.push(span.buffer(offset, len, writable));
            return Ok(());
        }
        let own = own.ok_or(Error::Closed(
            "the block was released before it was read or written",
        ))?;
        *ends = self.share.buffers(own, offset, len)?;
        Ok(())
    }

    fn parts(&self, place: &Place) -> Result<Option<Vec<Part>>, Error> {
        if let Some(parts) = parts::single(place) {
            return Ok(Some(parts.to_vec()));
        }
        let entries = self.entries.lock();
        let Some(What::Pinned(pinned)) = entries.get(&place.token.sequence) else {
            return Err(Error::Closed("the block was released before it was read"));
        };
        let begin = place.len.checked_sub(pinned.table.len() as u64);
        let (name, sum) = (&place.identity, place.checksum);
        Ok(begin.and_then(|begin| parts::of_table(name, &pinned.table, begin, sum)))
    }

    fn write_parts(&self, place: &Place, found: &[Part]) -> Result<(), Error> {
        let table = parts::encode(found);
        self.note(place, |new| new.table = table)
    }

    fn proof(&self, place: &Place) -> Option<Proof> {
        let key = self.keys.as_ref()?.of(place.identity.namespace)?;
        let entries = self.entries.lock();
        let macs = match entries.get(&place.token.sequence)? {
            What::Pinned(pinned) => pinned.macs.clone(),
            What::New(_) => Vec::new(),
        };
        Some(Proof::new(key, macs))
    }

    fn note_macs(&self, place: &Place, macs: Vec<Mac>) {
        let _gone = self.note(place, |new| new.macs = macs);
    }

    /// None where there are keys: only this process knows them, and who reads has to verify.
    fn door(&self) -> Option<DoorKey> {
        self.keys.is_none().then(|| self.key.lock().clone())
    }

    fn arena(&self) -> Option<Arc<Arena>> {
        let arena = self.share.arena();
        self.keys.is_none().then(|| Arc::clone(arena))
    }

    fn outside(&self, place: &Place) -> Option<Outside> {
        if self.keys.is_some() {
            return None;
        }
        self.site(place, |site| match site {
            Site::Here(_) => None,
            Site::There(_, far) => Some(self.pass.outside(far.target.address, far.id)),
        })?
    }
}

/// What stands behind a payload, as it is sent.
pub(super) fn tail_of(new: &New) -> Vec<u8> {
    let mut tail = new.table.clone();
    tail.extend(new.macs.iter().flat_map(|mac| mac.0));
    tail
}

/// A place, and what stands behind its payload, of what a home says: nothing is believed that does
/// not fit.
pub(super) fn read_tail(
    place: &mut Place,
    (stored, parts): (u64, u16),
    checksum: Checksum,
    tail: &[u8],
    mac: usize,
) -> Option<(Vec<u8>, Vec<Mac>)> {
    let table = match parts {
        0 => return None,
        1 => 0,
        many => usize::from(many) * parts::ENTRY as usize,
    };
    let macs = usize::from(parts) * mac;
    if tail.len() != table + macs {
        return None;
    }
    place.len = stored
        .checked_sub(macs as u64)
        .filter(|len| *len > table as u64)?;
    (place.parts, place.checksum) = (parts, checksum);
    let (table, macs) = tail.split_at(table);
    let (macs, _) = macs.as_chunks::<MAC>();
    Some((table.to_vec(), macs.iter().map(|mac| Mac(*mac)).collect()))
}

/// The rooms that a host has said it has; what makes no sense ends them.
pub(super) fn rooms_of(
    (said, lender): (Said, Lender),
    lens: &[u64],
    far: impl Fn(u64) -> Far,
) -> Option<Vec<Result<Room, Why>>> {
    let Said::Reserved(rooms) = said else {
        return None;
    };
    let held = rooms
        .into_iter()
        .map(|room| room.map(|room| (far(room.id), room.grant)));
    let held: Vec<Result<(Far, u32), Why>> = held.collect();
    if held.len() != lens.len() {
        return None;
    }
    let room = |(room, len): (Result<(Far, u32), Why>, &u64)| {
        let (far, grant) = room?;
        let remote = lender.lent(grant, *len, Rights::WRITE);
        Ok((Copy::There(far), Some(remote)))
    };
    Some(held.into_iter().zip(lens).map(room).collect())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvdepot_arena::{Key, Wanted};

    use super::*;
    use crate::peer_tier::share::OWN;

    #[test]
    fn a_call_lets_others_have_their_turn_between_its_pins() {
        const ALL: usize = 4000;
        /// Far more pins than a turn has, and far fewer than all.
        const MOST: usize = 1000;
        let (namespace, key) = (NamespaceId([1; 16]), Key([2; 32]));
        let share = Arc::new(Share::open(("Peer", 0), None, (1 << 20, false)).unwrap());
        let wanted = Wanted {
            key,
            len: 64,
            parts: 1,
            stamp: 0,
            copy: false,
            evict: true,
        };
        let reserved = share.reserve(OWN, namespace, vec![wanted]);
        let reserved = reserved.into_iter().next().unwrap().unwrap();
        assert!(share.commit(reserved, Checksum::default(), false));
        let pass = Pass {
            holder: OWN,
            token: Vec::new(),
            tls: None,
            lookup: Duration::ZERO,
            timeout: Duration::ZERO,
        };
        let held = Held::new(1, None, &share, pass);
        let pin = |_| {
            let place = share.hold(namespace, key).unwrap();
            let pinned = Pinned {
                site: Site::Here(Own::new(&share, place)),
                table: Vec::new(),
                macs: Vec::new(),
            };
            held.pin(place, pinned).token.sequence
        };
        let names: Vec<u64> = (0..ALL).map(pin).collect();
        let (mut left, mut most) = (ALL, 0);
        held.end(names.into_iter().inspect(|_| {
            let entries = held.entries.try_lock();
            let now = entries.expect("the lock is held for all pins").len();
            most = most.max(left - now);
            left = now;
        }));
        most = most.max(left);
        assert!((1..MOST).contains(&most), "{most} pins under one lock");
        assert!(held.entries.lock().is_empty());
        assert_eq!(share.arena().stats().pinned_blocks, 0);
    }
}
