//! The catalogue of checkpoints on disk, which orders them for deletion.

use std::time::Duration;

use kvdepot_session::policy::{Catalogue, Entry, Reason};
use parking_lot::Mutex;

use crate::given::{Growing, In, NONE, Out, Plain, maybe, moment};
use crate::guard::{Failure, Status};
use crate::handle::{Made, Ref};
use crate::policy;

/// A checkpoint on disk, `kvd_entry`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Kept {
    /// Size of the struct in bytes, as the caller knows it.
    pub struct_size: usize,
    /// ID that the caller chose.
    pub id: u64,
    /// ID of the longest checkpoint that is a proper prefix, or `KVD_NONE`.
    pub parent: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Bytes that its removal frees.
    pub bytes: u64,
    /// Number of restores from it.
    pub hits: u64,
    /// Time of the last use in milliseconds since 1970; 0 is now.
    pub used_ms: u64,
    /// A `kvd_reason`.
    pub reason: u32,
    /// Number of pins.
    pub pins: u32,
}

// SAFETY: numbers.
unsafe impl Plain for Kept {}

// SAFETY: `repr(C)`, and the size is the first field.
unsafe impl Growing for Kept {
    const FIRST: usize = 64;
}

fn reason(given: u32) -> Result<Reason, Failure> {
    let known = Reason::ALL.into_iter();
    let mut known = known.filter(|one| policy::number(*one) == given);
    known.next().ok_or_else(|| {
        let allowed =
            "KVD_REASON_COLD, KVD_REASON_CONTINUED, KVD_REASON_EVICT or KVD_REASON_SHUTDOWN";
        Failure::input("entry.reason", given, allowed)
    })
}

impl Kept {
    fn of(entry: &Entry) -> Kept {
        Kept {
            struct_size: 0,
            id: entry.id,
            parent: entry.parent.unwrap_or(NONE),
            tokens: entry.tokens,
            bytes: entry.bytes,
            hits: entry.hits,
            used_ms: entry.used.as_millis() as u64,
            reason: policy::number(entry.reason),
            pins: entry.pins,
        }
    }

    fn entry(&self) -> Result<Entry, Failure> {
        Ok(Entry {
            id: self.id,
            parent: maybe(self.parent),
            reason: reason(self.reason)?,
            tokens: self.tokens,
            bytes: self.bytes,
            hits: self.hits,
            used: moment(self.used_ms),
            pins: self.pins,
        })
    }
}

/// Returns an error if the entry or the pin does not exist.
fn known(is_there: bool, id: u64) -> Result<(), Failure> {
    match is_there {
        true => Ok(()),
        false => Err(Failure::new(
            Status::Unknown,
            format!("the catalogue has no checkpoint {id}, or no pin of this checkpoint"),
        )),
    }
}

exported! {
    /// Implements `kvd_catalogue_open`.
    fn kvd_catalogue_open(catalogue: Made<Mutex<Catalogue>>) {
        let catalogue = catalogue.making("catalogue")?;
        catalogue.put(Mutex::new(Catalogue::new()));
        Ok(())
    }

    /// Implements `kvd_catalogue_close`.
    fn kvd_catalogue_close(catalogue: Ref<Mutex<Catalogue>>) {
        drop(catalogue.end());
        Ok(())
    }

    /// Implements `kvd_catalogue_insert`.
    fn kvd_catalogue_insert(catalogue: Ref<Mutex<Catalogue>>, entry: In<Kept>) {
        let catalogue = catalogue.get("catalogue")?;
        let entry = entry.read("entry")?.entry()?;
        catalogue.lock().insert(entry);
        Ok(())
    }

    /// Implements `kvd_catalogue_remove`.
    fn kvd_catalogue_remove(catalogue: Ref<Mutex<Catalogue>>, id: u64) {
        let removed = catalogue.get("catalogue")?.lock().remove(id);
        known(removed.is_some(), id)
    }

    /// Implements `kvd_catalogue_info`.
    fn kvd_catalogue_info(catalogue: Ref<Mutex<Catalogue>>, id: u64, entry: Out<Kept>) {
        let place = entry.sized("entry")?;
        let catalogue = catalogue.get("catalogue")?;
        let found = catalogue.lock().get(id).map(Kept::of);
        known(found.is_some(), id)?;
        if let Some(found) = found {
            place.put(&found);
        }
        Ok(())
    }

    /// Implements `kvd_catalogue_hit`.
    fn kvd_catalogue_hit(catalogue: Ref<Mutex<Catalogue>>, id: u64, at_ms: u64) {
        let now: Duration = moment(at_ms);
        let is_there = catalogue.get("catalogue")?.lock().hit(id, now);
        known(is_there, id)
    }

    /// Implements `kvd_catalogue_pin`.
    fn kvd_catalogue_pin(catalogue: Ref<Mutex<Catalogue>>, id: u64) {
        let is_there = catalogue.get("catalogue")?.lock().pin(id);
        known(is_there, id)
    }

    /// Implements `kvd_catalogue_unpin`.
    fn kvd_catalogue_unpin(catalogue: Ref<Mutex<Catalogue>>, id: u64) {
        let is_there = catalogue.get("catalogue")?.lock().unpin(id);
        known(is_there, id)
    }

    /// Implements `kvd_catalogue_set_other`.
    fn kvd_catalogue_set_other(catalogue: Ref<Mutex<Catalogue>>, id: u64, bytes: u64) {
        catalogue.get("catalogue")?.lock().set_other(id, bytes);
        Ok(())
    }

    /// Implements `kvd_catalogue_bytes`.
    fn kvd_catalogue_bytes(catalogue: Ref<Mutex<Catalogue>>, bytes: Out<u64>) {
        let bytes = bytes.place("bytes")?;
        bytes.put(catalogue.get("catalogue")?.lock().bytes());
        Ok(())
    }

    /// Implements `kvd_catalogue_make_room`.
    fn kvd_catalogue_make_room(
        catalogue: Ref<Mutex<Catalogue>>, incoming: u64, disk_space: u64, at_ms: u64,
        ids: Out<u64>, ids_len: usize, count: Out<usize>,
    ) {
        let count = count.place("count")?;
        let catalogue = catalogue.get("catalogue")?;
        let going = catalogue.lock().make_room(incoming, disk_space, moment(at_ms));
        let Some(going) = going else {
            count.put(0);
            let message = format!("{incoming} bytes do not fit into {disk_space} bytes, even after \
                                   all evictions");
            return Err(Failure::new(Status::Full, message));
        };
        count.put(going.len());
        ids.fill("ids", ids_len, &going)
    }
}
