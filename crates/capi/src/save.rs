//! Saves of checkpoints, with the caller's callback for the memory of rows.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use std::ops::Range;

use kvdepot_session::{Checkpoint, Error, Reason, Sessions};
use kvdepot_store::{BlockBuffers, Buffer};

use crate::given::{Growing, In, Out, Plain, Text, flag, moment};
use crate::guard::{Failure, Status};
use crate::handle::Ref;
use crate::memory::{Block, Lent, Piece, buffers};

/// Allowed reasons, for messages.
const REASONS: &str = "KVD_REASON_ASKED, KVD_REASON_COLD, KVD_REASON_CONTINUED, \
                       KVD_REASON_EVICT or KVD_REASON_SHUTDOWN";

/// Size of a session ID in bytes: 32 hexadecimal digits and a zero byte.
pub const ID_LEN: usize = 33;

/// A part that does not grow with the tokens, `kvd_object`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Object {
    /// Name of the object.
    pub name: Text,
    /// Memory of the object.
    pub bytes: Piece,
}

// SAFETY: pointers and numbers.
unsafe impl Plain for Object {}

/// A state to save, `kvd_checkpoint`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Given {
    /// Size of the struct in bytes, as the caller knows it.
    pub struct_size: usize,
    /// All tokens of the conversation.
    pub tokens: In<u32>,
    /// Number of tokens.
    pub tokens_len: usize,
    /// Text from which the tokens were rendered.
    pub text: In<u8>,
    /// Size of the text in bytes.
    pub text_len: usize,
    /// Parts that do not grow with the tokens.
    pub objects: In<Object>,
    /// Number of objects.
    pub objects_len: usize,
    /// Note of the user; may be null.
    pub note: Text,
    /// Time of the save in seconds since 1970; 0 is now.
    pub created: u64,
    /// A `kvd_reason`.
    pub reason: u32,
    /// Capacity of the engine's context in tokens.
    pub context_tokens: u32,
    /// 1 if restores must return exactly these bits.
    pub exact: u32,
    /// Reserved; 0.
    pub reserved: u32,
}

// SAFETY: pointers and numbers.
unsafe impl Plain for Given {}

// SAFETY: `repr(C)`, and the size is the first field.
unsafe impl Growing for Given {
    const FIRST: usize = 88;
}

/// A range of tokens, `kvd_run`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Run {
    /// First token.
    pub first: usize,
    /// Token after the last one.
    pub end: usize,
}

/// Result of a save, `kvd_saved`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Saved {
    /// Size of the struct in bytes, as the caller knows it.
    pub struct_size: usize,
    /// Tokens of pieces that were stored before.
    pub cached_tokens: usize,
    /// Tokens of pieces that were written.
    pub cache_write_tokens: usize,
    /// Number of bytes that were written.
    pub bytes_written: u64,
    /// ID of the session.
    pub id: [c_char; ID_LEN],
    /// Reserved; zeros.
    pub reserved: [u8; 7],
}

// SAFETY: numbers.
unsafe impl Plain for Saved {}

// SAFETY: `repr(C)`, and the size is the first field.
unsafe impl Growing for Saved {
    const FIRST: usize = 72;
}

/// Callback that returns the memory of rows, `kvd_rows_fn`.
pub type RowsFn = Option<
    unsafe extern "C" fn(
        user: *mut c_void,
        runs: *const Run,
        runs_len: usize,
        blocks: *mut Block,
    ) -> c_int,
>;

/// Converts a `kvd_reason`.
pub(crate) fn reason(number: u32) -> Result<Reason, Failure> {
    match number {
        0 => Ok(Reason::Asked),
        1 => Ok(Reason::Cold),
        2 => Ok(Reason::Continued),
        3 => Ok(Reason::Evict),
        4 => Ok(Reason::Shutdown),
        other => Err(Failure::input("reason", other, REASONS)),
    }
}

/// Converts a session ID into a string for C.
pub(crate) fn digits(id: &impl ToString) -> [c_char; ID_LEN] {
    let mut said = [0; ID_LEN];
    for (to, from) in said.iter_mut().zip(id.to_string().bytes().take(ID_LEN - 1)) {
        *to = from as c_char;
    }
    said
}

fn objects(lent: &Lent, given: &[Object]) -> Result<Vec<(String, Buffer)>, Failure> {
    let each = given.iter().enumerate().map(|(at, one)| {
        let name = one.name.read(&format!("objects[{at}].name"))?;
        let bytes = one
            .bytes
            .buffer(lent, &format!("objects[{at}].bytes"), false)?;
        Ok((name.to_owned(), bytes))
    });
    each.collect()
}

/// Calls the callback for the memory of the rows of `runs`.
fn ask(
    lent: &Lent,
    rows: RowsFn,
    user: *mut c_void,
    runs: &[Range<usize>],
) -> Result<BlockBuffers, Failure> {
    let Some(rows) = rows else {
        return Err(Failure::input("rows", "NULL", "a function"));
    };
    let runs: Vec<Run> = runs
        .iter()
        .map(|run| Run {
            first: run.start,
            end: run.end,
        })
        .collect();
    // SAFETY: null and zero, which are values of both fields.
    let nothing: Block = unsafe { std::mem::zeroed() };
    let mut blocks = vec![nothing; runs.len()];
    // SAFETY: the caller's function, which gets arrays of as many as it is told, and by the header
    // does not throw.
    let answer = unsafe { rows(user, runs.as_ptr(), runs.len(), blocks.as_mut_ptr()) };
    match answer {
        0 => buffers(lent, "rows", &blocks, false),
        other => Err(Failure::new(
            Status::Aborted,
            format!("the callback `rows` returned {other}; nothing was saved"),
        )),
    }
}

fn save(
    sessions: &Sessions,
    given: &Given,
    rows: RowsFn,
    user: *mut c_void,
) -> Result<kvdepot_session::Saved, Failure> {
    if given.reserved != 0 {
        return Err(Failure::input("checkpoint.reserved", given.reserved, "0"));
    }
    if rows.is_none() {
        return Err(Failure::input("rows", "NULL", "a function"));
    }
    let lent = Lent::new();
    let created = match given.created {
        0 => moment(0).as_secs(),
        seconds => seconds,
    };
    let checkpoint = Checkpoint {
        tokens: given.tokens.slice("tokens", given.tokens_len)?,
        text: given.text.slice("text", given.text_len)?,
        reason: reason(given.reason)?,
        context_tokens: given.context_tokens,
        objects: objects(&lent, given.objects.slice("objects", given.objects_len)?)?,
        note: given.note.maybe("note")?.unwrap_or_default().to_owned(),
        created,
        exact: flag("exact", given.exact)?,
    };
    let refused = Cell::new(None);
    let asked = |runs: &[Range<usize>]| {
        ask(&lent, rows, user, runs).map_err(|failure| {
            refused.set(Some(failure));
            Error::Input {
                field: "rows".into(),
                value: "a failure".into(),
                allowed: "memory".into(),
            }
        })
    };
    // It returns after the last copy thread has released the memory.
    let saved = sessions.save(checkpoint, Box::new(asked));
    match refused.take() {
        Some(failure) => Err(failure),
        None => Ok(saved?),
    }
}

exported! {
    /// Implements `kvd_sessions_save`.
    fn kvd_sessions_save(
        sessions: Ref<Sessions>, given: In<Given>, rows: RowsFn, user: *mut c_void,
        saved: Out<Saved>,
    ) {
        let told = match saved.wanted("saved")? {
            Some(_) => Some(saved.sized("saved")?),
            None => None,
        };
        let sessions = sessions.get("sessions")?;
        let saved = save(sessions, &given.read("checkpoint")?, rows, user)?;
        if let Some(told) = told {
            told.put(&Saved {
                struct_size: 0,
                cached_tokens: saved.cached_tokens,
                cache_write_tokens: saved.cache_write_tokens,
                bytes_written: saved.bytes_written,
                id: digits(&saved.id),
                reserved: [0; 7],
            });
        }
        Ok(())
    }
}
