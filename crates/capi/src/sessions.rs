//! Sessions: opening, lookups and restores.

use std::ffi::{CString, c_char, c_void};

use kvdepot_session::{Found, Sessions, Spec};
use kvdepot_store::Depot;

use crate::blocks::Space;
use crate::given::{Growing, In, Out, Plain};
use crate::guard::{Failure, Status};
use crate::handle::{Made, Ref, many};
use crate::memory::{Block, Lent, buffers};

/// A piece of a session, `kvd_piece`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Piece {
    /// First token.
    pub first: usize,
    /// Token after the last one.
    pub end: usize,
    /// Size of its rows in bytes.
    pub bytes: u64,
}

/// Name and size of an object, `kvd_named`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Named {
    /// Name of the object.
    pub name: *const c_char,
    /// Size in bytes.
    pub bytes: u64,
}

/// Description of a session, `kvd_found_about`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct About {
    /// Size of the struct in bytes, as the caller knows it.
    pub struct_size: usize,
    /// ID of the session.
    pub id: *const c_char,
    /// Tokens of the session.
    pub tokens: *const u32,
    /// Number of tokens.
    pub tokens_len: usize,
    /// Text from which the tokens were rendered.
    pub text: *const c_void,
    /// Size of the text in bytes.
    pub text_len: usize,
    /// Pieces of the session.
    pub pieces: *const Piece,
    /// Number of pieces.
    pub pieces_len: usize,
    /// Objects of the session.
    pub objects: *const Named,
    /// Number of objects.
    pub objects_len: usize,
    /// Note of the user.
    pub note: *const c_char,
    /// Capacity of the context that saved it, in tokens.
    pub context_tokens: u64,
}

// SAFETY: pointers and numbers.
unsafe impl Plain for About {}

// SAFETY: `repr(C)`, and the size is the first field.
unsafe impl Growing for About {
    const FIRST: usize = 96;
}

/// Result of a restore, `kvd_restored`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Back {
    /// Size of the struct in bytes, as the caller knows it.
    pub struct_size: usize,
    /// Leading tokens whose rows were restored.
    pub cached_tokens: usize,
    /// 1 if all pieces and objects were restored.
    pub whole: u64,
}

// SAFETY: numbers.
unsafe impl Plain for Back {}

// SAFETY: `repr(C)`, and the size is the first field.
unsafe impl Growing for Back {
    const FIRST: usize = 24;
}

/// A session that was found, with the data that C reads in place.
#[derive(Debug)]
pub struct Shown {
    pub(crate) found: Found,
    id: CString,
    note: CString,
    pieces: Vec<Piece>,
    objects: Vec<(CString, u64)>,
    named: Vec<Named>,
}

// SAFETY: `named` points to names that `objects` has, on the heap, and nobody changes either.
unsafe impl Send for Shown {}
// SAFETY: as above.
unsafe impl Sync for Shown {}

pub(crate) fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', "?")).unwrap_or_default()
}

impl Shown {
    pub(crate) fn of(found: Found) -> Shown {
        let each = found.pieces.iter();
        let pieces = each.map(|(run, bytes)| Piece {
            first: run.start,
            end: run.end,
            bytes: *bytes,
        });
        let each = found.objects.iter();
        let objects: Vec<(CString, u64)> = each.map(|one| (c_text(&one.name), one.bytes)).collect();
        let named = objects.iter().map(|(name, bytes)| Named {
            name: name.as_ptr(),
            bytes: *bytes,
        });
        Shown {
            id: c_text(&found.id.to_string()),
            note: c_text(found.note()),
            pieces: pieces.collect(),
            named: named.collect(),
            objects,
            found,
        }
    }

    fn about(&self) -> About {
        let text = self.found.text();
        debug_assert_eq!(self.objects.len(), self.named.len());
        About {
            struct_size: 0,
            id: self.id.as_ptr(),
            tokens: self.found.tokens.as_ptr(),
            tokens_len: self.found.tokens.len(),
            text: text.as_ptr().cast(),
            text_len: text.len(),
            pieces: self.pieces.as_ptr(),
            pieces_len: self.pieces.len(),
            objects: self.named.as_ptr(),
            objects_len: self.named.len(),
            note: self.note.as_ptr(),
            context_tokens: self.found.context_tokens.into(),
        }
    }
}

/// Writes the sessions that were found as handles into the caller's array.
fn tell(
    found: Vec<Found>,
    into: &Made<Shown>,
    most: usize,
    count: Out<usize>,
) -> Result<(), Failure> {
    let count = count.place("count")?;
    let handles = many(found.into_iter().map(Shown::of).collect())?;
    let told = into.fill("found", most, &handles);
    match &told {
        Ok(()) => count.put(handles.len()),
        Err(_) => handles.into_iter().for_each(|handle| drop(handle.end())),
    }
    told
}

exported! {
    /// Implements `kvd_sessions_open`.
    fn kvd_sessions_open(
        depot: Ref<Depot>, space: In<Space>, sessions: Made<Sessions>,
    ) {
        let sessions = sessions.making("sessions")?;
        let depot = depot.get("depot")?;
        let spec = space.read("space")?.spec()?;
        if let Some(group) = spec.group {
            return Err(Failure::input("group", group, "NULL, because sessions have their own groups"));
        }
        sessions.put(Sessions::open(depot.clone(), &Spec::new(spec))?);
        Ok(())
    }

    /// Implements `kvd_sessions_close`.
    fn kvd_sessions_close(sessions: Ref<Sessions>) {
        drop(sessions.end());
        Ok(())
    }

    /// Implements `kvd_sessions_refresh`.
    fn kvd_sessions_refresh(sessions: Ref<Sessions>) {
        Ok(sessions.get("sessions")?.refresh()?)
    }

    /// Implements `kvd_sessions_lookup`.
    fn kvd_sessions_lookup(
        sessions: Ref<Sessions>, tokens: In<u32>, tokens_len: usize, found: Made<Shown>,
        most: usize, count: Out<usize>,
    ) {
        count.place("count")?.put(0);
        let sessions = sessions.get("sessions")?;
        let tokens = tokens.slice("tokens", tokens_len)?;
        tell(sessions.lookup(tokens, most)?, &found, most, count)
    }

    /// Implements `kvd_sessions_lookup_text`.
    fn kvd_sessions_lookup_text(
        sessions: Ref<Sessions>, text: In<u8>, text_len: usize, found: Made<Shown>,
        most: usize, count: Out<usize>,
    ) {
        count.place("count")?.put(0);
        let sessions = sessions.get("sessions")?;
        let text = text.slice("text", text_len)?;
        tell(sessions.lookup_text(text, most)?, &found, most, count)
    }

    /// Implements `kvd_sessions_prefix`.
    fn kvd_sessions_prefix(
        sessions: Ref<Sessions>, tokens: In<u32>, tokens_len: usize, count: Out<usize>,
    ) {
        let count = count.place("count")?;
        let sessions = sessions.get("sessions")?;
        count.put(sessions.prefix(tokens.slice("tokens", tokens_len)?)?);
        Ok(())
    }

    /// Implements `kvd_found_info`.
    fn kvd_found_info(found: Ref<Shown>, about: Out<About>) {
        let about = about.sized("about")?;
        about.put(&found.get("found")?.about());
        Ok(())
    }

    /// Implements `kvd_found_free`.
    fn kvd_found_free(found: Ref<Shown>) {
        drop(found.end());
        Ok(())
    }

    /// Implements `kvd_sessions_object`.
    fn kvd_sessions_object(
        sessions: Ref<Sessions>, found: Ref<Shown>, at: usize, into: In<Block>,
    ) {
        let sessions = sessions.get("sessions")?;
        let found = &found.get("found")?.found;
        let lent = Lent::new();
        let into = buffers(&lent, "into", into.slice("into", 1)?, true)?;
        match sessions.restore_object(found, at, into)? {
            true => Ok(()),
            false => Err(Failure::new(Status::NotWhole, format!(
                "session {} is incomplete: an object is missing or corrupt", found.id,
            ))),
        }
    }

    /// Implements `kvd_sessions_restore`.
    fn kvd_sessions_restore(
        sessions: Ref<Sessions>, found: Ref<Shown>, rows: In<Block>, rows_len: usize,
        objects: In<Block>, objects_len: usize, back: Out<Back>,
    ) {
        let back = match back.wanted("restored")? {
            Some(_) => Some(back.sized("restored")?),
            None => None,
        };
        let sessions = sessions.get("sessions")?;
        let found = &found.get("found")?.found;
        let lent = Lent::new();
        let rows = buffers(&lent, "rows", rows.slice("rows", rows_len)?, true)?;
        let objects = buffers(&lent, "objects", objects.slice("objects", objects_len)?, true)?;
        // It returns after the last copy thread has released the memory.
        let restored = sessions.restore(found, rows, objects)?;
        if let Some(back) = back {
            back.put(&Back {
                struct_size: 0,
                cached_tokens: restored.cached_tokens,
                whole: restored.whole.into(),
            });
        }
        match restored.whole {
            true => Ok(()),
            false => Err(Failure::new(Status::NotWhole, format!(
                "session {} is incomplete: {} of its {} tokens were restored",
                found.id, restored.cached_tokens, found.tokens.len(),
            ))),
        }
    }
}
