//! What checkpoints are on disk, and which go where it is short.

use std::time::Duration;

use kvdepot_session::policy::{Catalogue, Entry, Reason};
use parking_lot::Mutex;

use crate::given::{Growing, In, NONE, Out, Plain, maybe, moment};
use crate::guard::{Failure, Status};
use crate::handle::{Made, Ref};
use crate::policy;

/// `kvd_entry`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Kept {
    /// Its size, as the caller knows it.
    pub struct_size: usize,
    /// Names it.
    pub id: u64,
    /// The one that it grows from.
    pub parent: u64,
    /// Its tokens.
    pub tokens: u64,
    /// Bytes that its removal gives back.
    pub bytes: u64,
    /// Restores from it.
    pub hits: u64,
    /// When it was last used, in milliseconds since 1970; 0 is now.
    pub used_ms: u64,
    /// Why it was taken.
    pub reason: u32,
    /// Who needs it now.
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
        let allowed = "KVD_COLD, KVD_CONTINUED, KVD_EVICT or KVD_SHUTDOWN";
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

/// What is not there is answered as such.
fn known(is_there: bool, id: u64) -> Result<(), Failure> {
    match is_there {
        true => Ok(()),
        false => Err(Failure::new(
            Status::Unknown,
            format!("the catalogue has no checkpoint {id}, or no pin of it"),
        )),
    }
}

exported! {
    /// `kvd_catalogue_open`.
    fn kvd_catalogue_open(catalogue: Made<Mutex<Catalogue>>) {
        let catalogue = catalogue.making("catalogue")?;
        catalogue.put(Mutex::new(Catalogue::new()));
        Ok(())
    }

    /// `kvd_catalogue_close`.
    fn kvd_catalogue_close(catalogue: Ref<Mutex<Catalogue>>) {
        drop(catalogue.end());
        Ok(())
    }

    /// `kvd_catalogue_insert`.
    fn kvd_catalogue_insert(catalogue: Ref<Mutex<Catalogue>>, entry: In<Kept>) {
        let catalogue = catalogue.get("catalogue")?;
        let entry = entry.read("entry")?.entry()?;
        catalogue.lock().insert(entry);
        Ok(())
    }

    /// `kvd_catalogue_remove`.
    fn kvd_catalogue_remove(catalogue: Ref<Mutex<Catalogue>>, id: u64) {
        let removed = catalogue.get("catalogue")?.lock().remove(id);
        known(removed.is_some(), id)
    }

    /// `kvd_catalogue_look`.
    fn kvd_catalogue_look(catalogue: Ref<Mutex<Catalogue>>, id: u64, entry: Out<Kept>) {
        let place = entry.sized("entry")?;
        let catalogue = catalogue.get("catalogue")?;
        let found = catalogue.lock().get(id).map(Kept::of);
        known(found.is_some(), id)?;
        if let Some(found) = found {
            place.put(&found);
        }
        Ok(())
    }

    /// `kvd_catalogue_hit`.
    fn kvd_catalogue_hit(catalogue: Ref<Mutex<Catalogue>>, id: u64, at_ms: u64) {
        let now: Duration = moment(at_ms);
        let is_there = catalogue.get("catalogue")?.lock().hit(id, now);
        known(is_there, id)
    }

    /// `kvd_catalogue_pin`.
    fn kvd_catalogue_pin(catalogue: Ref<Mutex<Catalogue>>, id: u64) {
        let is_there = catalogue.get("catalogue")?.lock().pin(id);
        known(is_there, id)
    }

    /// `kvd_catalogue_unpin`.
    fn kvd_catalogue_unpin(catalogue: Ref<Mutex<Catalogue>>, id: u64) {
        let is_there = catalogue.get("catalogue")?.lock().unpin(id);
        known(is_there, id)
    }

    /// `kvd_catalogue_set_other`.
    fn kvd_catalogue_set_other(catalogue: Ref<Mutex<Catalogue>>, id: u64, bytes: u64) {
        catalogue.get("catalogue")?.lock().set_other(id, bytes);
        Ok(())
    }

    /// `kvd_catalogue_bytes`.
    fn kvd_catalogue_bytes(catalogue: Ref<Mutex<Catalogue>>, bytes: Out<u64>) {
        let bytes = bytes.place("bytes")?;
        bytes.put(catalogue.get("catalogue")?.lock().bytes());
        Ok(())
    }

    /// `kvd_catalogue_make_room`.
    fn kvd_catalogue_make_room(
        catalogue: Ref<Mutex<Catalogue>>, incoming: u64, disk_space: u64, at_ms: u64,
        ids: Out<u64>, ids_len: usize, count: Out<usize>,
    ) {
        let count = count.place("count")?;
        let catalogue = catalogue.get("catalogue")?;
        let going = catalogue.lock().make_room(incoming, disk_space, moment(at_ms));
        let Some(going) = going else {
            count.put(0);
            let message = format!("{incoming} bytes do not fit into {disk_space}, whatever goes");
            return Err(Failure::new(Status::Full, message));
        };
        count.put(going.len());
        ids.fill("ids", ids_len, &going)
    }
}
