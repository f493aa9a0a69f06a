//! Pins and reservations, for stores and loads whose bytes other processes copy.

use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::sync::Arc;

use kvdepot_store::{Checksum, Key, Namespace, Pin, Reservation};

use crate::blocks::keys;
use crate::given::{Growing, In, Out, Plain};
use crate::guard::Failure;
use crate::handle::{Made, Ref, many};
use crate::sessions::c_text;

/// `KVD_PIN_PREFIX`: pin only the blocks before the first miss.
pub const PIN_PREFIX: u32 = 1;
/// `KVD_RESERVE_PREFIX`: stop at the first block that is rejected or has no space.
pub const RESERVE_PREFIX: u32 = 1;
/// `KVD_RESERVE_STRICT`: fail if one block has no space.
pub const RESERVE_STRICT: u32 = 2;

/// A pin or reservation with its placement.
pub struct Hold<T> {
    what: T,
    /// Shared by the holds of one call, which are ended together.
    namespace: Arc<Namespace>,
    placement: Vec<u8>,
    tier: CString,
}

impl<T> fmt::Debug for Hold<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Hold")
    }
}

/// Description of a pin or reservation, `kvd_place`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Place {
    /// Size of the struct in bytes, as the caller knows it.
    pub struct_size: usize,
    /// Placement of the block, for a mover.
    pub placement: *const u8,
    /// Size of the placement in bytes.
    pub placement_len: usize,
    /// Name of the tier of a pin; empty for a reservation.
    pub tier: *const c_char,
    /// Size of the block in bytes.
    pub bytes: u64,
    /// Key of the block.
    pub key: [u8; 32],
}

// SAFETY: pointers and numbers.
unsafe impl Plain for Place {}

// SAFETY: `repr(C)`, and the size is the first field.
unsafe impl Growing for Place {
    const FIRST: usize = 72;
}

impl<T> Hold<T> {
    fn new(what: T, namespace: &Arc<Namespace>, placement: Vec<u8>, tier: &str) -> Hold<T> {
        Hold {
            what,
            namespace: Arc::clone(namespace),
            placement,
            tier: c_text(tier),
        }
    }

    fn place(&self, key: Key, bytes: u64) -> Place {
        Place {
            struct_size: 0,
            placement: self.placement.as_ptr(),
            placement_len: self.placement.len(),
            tier: CStr::as_ptr(&self.tier),
            bytes,
            key: key.0,
        }
    }
}

/// A reservation, and the size of its parts in bytes.
#[derive(Debug)]
pub struct Room {
    reservation: Reservation,
    bytes: u64,
}

/// Writes handles into the caller's array, null for `None`. If that fails, `undo` ends them.
fn tell<T>(
    all: Vec<Option<Hold<T>>>,
    field: &str,
    into: &Made<Hold<T>>,
    len: usize,
    undo: impl Fn(Vec<Hold<T>>),
) -> Result<(), Failure>
where
    Hold<T>: Send + Sync,
{
    let is_there: Vec<bool> = all.iter().map(Option::is_some).collect();
    let mut handles = many(all.into_iter().flatten().collect())?.into_iter();
    let next = |there: bool| if there { handles.next() } else { None };
    let mut told: Vec<Ref<Hold<T>>> = is_there
        .into_iter()
        .map(next)
        .map(|handle| handle.unwrap_or_else(Ref::none))
        .collect();
    // With a prefix flag, the result may be shorter than the array.
    told.resize(len.max(told.len()), Ref::none());
    let filled = into.fill(field, len, &told);
    if filled.is_err() {
        undo(told.into_iter().filter_map(Ref::end).collect());
    }
    filled
}

/// Calls `end` once for each group of holds that one call made.
fn each_call<T>(holds: Vec<Hold<T>>, mut end: impl FnMut(&Namespace, Vec<T>)) {
    let mut holds = holds.into_iter().peekable();
    while let Some(first) = holds.next() {
        let namespace = first.namespace;
        let mut some = vec![first.what];
        while let Some(next) = holds.next_if(|next| Arc::ptr_eq(&next.namespace, &namespace)) {
            some.push(next.what);
        }
        end(&namespace, some);
    }
}

fn unpin(holds: Vec<Hold<Pin>>, served: bool) {
    each_call(holds, |namespace, pins| namespace.unpin(&pins, served));
}

fn abort(holds: Vec<Hold<Room>>) {
    each_call(holds, |namespace, rooms| {
        let all: Vec<Reservation> = rooms.into_iter().map(|room| room.reservation).collect();
        namespace.abort(&all);
    });
}

/// Returns the handles of an array that are not null.
fn given<T>(field: &str, all: In<Ref<Hold<T>>>, len: usize) -> Result<Vec<Ref<Hold<T>>>, Failure>
where
    Hold<T>: Send + Sync,
{
    let all = all.slice(field, len)?.iter().enumerate();
    let there = all.filter(|(_, one)| !one.is_null());
    let each = there.map(|(at, one)| {
        one.get(&format!("{field}[{at}]"))?;
        Ok(*one)
    });
    each.collect()
}

exported! {
    /// Implements `kvd_pin`.
    fn kvd_pin(
        namespace: Ref<Namespace>, wanted: In<[u8; 32]>, wanted_len: usize, flags: u32,
        pins: Made<Hold<Pin>>,
    ) {
        if flags & !PIN_PREFIX != 0 {
            let allowed = "KVD_PIN_PREFIX or 0";
            return Err(Failure::input("flags", format!("{flags:#x}"), allowed));
        }
        pins.room("pins", wanted_len)?;
        let namespace = Arc::new(namespace.get("namespace")?.clone());
        let pinned = namespace.pin(&keys(&wanted, wanted_len)?, flags & PIN_PREFIX != 0)?;
        let held = pinned.into_iter().map(|pin| pin.map(|pin| {
            let (placement, tier) = (pin.placement(), pin.tier());
            Hold::new(pin, &namespace, placement, tier)
        }));
        tell(held.collect(), "pins", &pins, wanted_len, |pins| unpin(pins, false))
    }

    /// Implements `kvd_pinned_info`.
    fn kvd_pinned_info(pin: Ref<Hold<Pin>>, place: Out<Place>) {
        let place = place.sized("place")?;
        let hold = pin.get("pin")?;
        place.put(&hold.place(hold.what.key(), hold.what.bytes()));
        Ok(())
    }

    /// Implements `kvd_unpin`.
    fn kvd_unpin(pins: In<Ref<Hold<Pin>>>, pins_len: usize, served: u32) {
        let served = crate::given::flag("served", served)?;
        let pins = given("pins", pins, pins_len)?;
        unpin(pins.into_iter().filter_map(Ref::end).collect(), served);
        Ok(())
    }

    /// Implements `kvd_discard`.
    fn kvd_discard(pins: In<Ref<Hold<Pin>>>, pins_len: usize, count: Out<usize>) {
        let count = count.wanted("count")?;
        let mut gone = 0;
        for pin in given("pins", pins, pins_len)? {
            let hold = pin.get("pins")?;
            gone += hold.namespace.discard(std::slice::from_ref(&hold.what));
        }
        if let Some(count) = count {
            count.put(gone);
        }
        Ok(())
    }

    /// Implements `kvd_reserve`.
    fn kvd_reserve(
        namespace: Ref<Namespace>, wanted: In<[u8; 32]>, wanted_len: usize, parts: In<u64>,
        parts_len: usize, flags: u32, rooms: Made<Hold<Room>>,
    ) {
        rooms.room("reserved", wanted_len)?;
        let namespace = Arc::new(namespace.get("namespace")?.clone());
        let parts = parts.slice("parts", parts_len)?;
        let blocks = keys(&wanted, wanted_len)?.into_iter().map(|key| (key, parts.to_vec()));
        let blocks: Vec<(Key, Vec<u64>)> = blocks.collect();
        let reserved = match flags {
            0 => namespace.reserve(&blocks)?,
            RESERVE_PREFIX => namespace.reserve_prefix(&blocks)?,
            RESERVE_STRICT => namespace.reserve_strict(&blocks)?,
            other => {
                let allowed = "KVD_RESERVE_PREFIX, KVD_RESERVE_STRICT or 0";
                return Err(Failure::input("flags", format!("{other:#x}"), allowed));
            }
        };
        let bytes = parts.iter().sum();
        let held = reserved.into_iter().map(|one| one.map(|reservation| {
            let placement = reservation.placement();
            Hold::new(Room { reservation, bytes }, &namespace, placement, "")
        }));
        tell(held.collect(), "reserved", &rooms, wanted_len, abort)
    }

    /// Implements `kvd_reserved_info`.
    fn kvd_reserved_info(room: Ref<Hold<Room>>, place: Out<Place>) {
        let place = place.sized("place")?;
        let hold = room.get("reserved")?;
        place.put(&hold.place(hold.what.reservation.key(), hold.what.bytes));
        Ok(())
    }

    /// Implements `kvd_commit`.
    fn kvd_commit(
        rooms: In<Ref<Hold<Room>>>, rooms_len: usize, sums: In<[u8; 16]>, sums_len: usize,
        stored: Out<u8>,
    ) {
        stored.room("stored", rooms_len)?;
        let all = rooms.slice("reserved", rooms_len)?;
        let mut sums = sums.slice("sums", sums_len)?.iter().map(|sum| Checksum(*sum));
        let there = given("reserved", rooms, rooms_len)?;
        let mut lists: Vec<Vec<Checksum>> = Vec::new();
        for room in &there {
            let parts = room.get("reserved")?.what.reservation.parts();
            lists.push(sums.by_ref().take(parts).collect());
        }
        let wanted = lists.iter().zip(&there).all(|(list, room)| {
            room.get("reserved").is_ok_and(|room| room.what.reservation.check(list).is_ok())
        });
        if !wanted || sums.next().is_some() {
            let allowed = "one checksum per part of each reservation that is not NULL";
            return Err(Failure::input("sums_len", sums_len, allowed));
        }
        let mut lists = lists.into_iter();
        let mut done = Vec::new();
        let mut failed = None;
        let ended = there.into_iter().filter_map(Ref::end).collect();
        each_call(ended, |namespace, rooms| {
            let rooms: Vec<Reservation> = rooms.into_iter().map(|room| room.reservation).collect();
            let sums: Vec<Vec<Checksum>> = lists.by_ref().take(rooms.len()).collect();
            match namespace.commit(&rooms, &sums) {
                Ok(each) => done.extend(each),
                Err(error) => {
                    done.resize(done.len() + rooms.len(), false);
                    failed = Some(error);
                }
            }
        });
        let mut done = done.into_iter();
        let answers = all.iter().map(|room| !room.is_null() && done.next() == Some(true));
        let answers: Vec<u8> = answers.map(u8::from).collect();
        stored.fill("stored", rooms_len, &answers)?;
        failed.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Implements `kvd_abort`.
    fn kvd_abort(rooms: In<Ref<Hold<Room>>>, rooms_len: usize) {
        let rooms = given("reserved", rooms, rooms_len)?;
        abort(rooms.into_iter().filter_map(Ref::end).collect());
        Ok(())
    }
}
