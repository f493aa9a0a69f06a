//! Saving: a checkpoint, and the caller's function that says where its rows lie.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use std::ops::Range;

use kvdepot_session::{Checkpoint, Error, Reason, Sessions};
use kvdepot_store::{BlockBuffers, Buffer};

use crate::given::{Growing, In, Out, Plain, Text, flag, moment};
use crate::guard::{Failure, Status};
use crate::handle::Ref;
use crate::memory::{Block, Lent, Piece, buffers};

/// What a reason may be.
const REASONS: &str = "KVD_ASKED, KVD_COLD, KVD_CONTINUED, KVD_EVICT or KVD_SHUTDOWN";

/// Hexadecimal digits of a session's name, and the zero behind them.
pub const ID_LEN: usize = 33;

/// `kvd_object`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Object {
    /// Its name.
    pub name: Text,
    /// Its bytes.
    pub bytes: Piece,
}

// SAFETY: pointers and numbers.
unsafe impl Plain for Object {}

/// `kvd_checkpoint`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Given {
    /// Its size, as the caller knows it.
    pub struct_size: usize,
    /// All of its tokens.
    pub tokens: In<u32>,
    /// How many.
    pub tokens_len: usize,
    /// What they were rendered from.
    pub text: In<u8>,
    /// Its bytes.
    pub text_len: usize,
    /// Parts that do not grow with the tokens.
    pub objects: In<Object>,
    /// How many.
    pub objects_len: usize,
    /// What is noted.
    pub note: Text,
    /// When, in Unix seconds; 0 is now.
    pub created: u64,
    /// Why.
    pub reason: u32,
    /// Tokens that the engine has room for.
    pub context_tokens: u32,
    /// Whether it comes back to the bit.
    pub exact: u32,
    /// Zero.
    pub reserved: u32,
}

// SAFETY: pointers and numbers.
unsafe impl Plain for Given {}

// SAFETY: `repr(C)`, and the size is the first field.
unsafe impl Growing for Given {
    const FIRST: usize = 88;
}

/// `kvd_run`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Run {
    /// Its first token.
    pub first: usize,
    /// The token behind its last one.
    pub end: usize,
}

/// `kvd_saved`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Saved {
    /// Its size, as the caller knows it.
    pub struct_size: usize,
    /// Tokens whose pieces were there.
    pub cached_tokens: usize,
    /// Tokens whose pieces were written.
    pub cache_write_tokens: usize,
    /// Bytes that were written.
    pub bytes_written: u64,
    /// The session's name.
    pub id: [c_char; ID_LEN],
    /// Zeros.
    pub reserved: [u8; 7],
}

// SAFETY: numbers.
unsafe impl Plain for Saved {}

// SAFETY: `repr(C)`, and the size is the first field.
unsafe impl Growing for Saved {
    const FIRST: usize = 72;
}

/// `kvd_rows_fn`.
pub type RowsFn = Option<
    unsafe extern "C" fn(
        user: *mut c_void,
        runs: *const Run,
        runs_len: usize,
        blocks: *mut Block,
    ) -> c_int,
>;

/// A reason of the interface.
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

/// A session's name as C has it.
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

/// Asks the caller where the rows of runs of tokens lie.
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
            format!("rows has answered {other}: nothing was saved"),
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
    // It returns only when no lane touches the memory any more.
    let saved = sessions.save(checkpoint, Box::new(asked));
    match refused.take() {
        Some(failure) => Err(failure),
        None => Ok(saved?),
    }
}

exported! {
    /// `kvd_sessions_save`.
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
