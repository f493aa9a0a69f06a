//! Maintenance of sessions: listing, verification, removal, and session files.

use std::ffi::{CString, c_char};
use std::path::Path;

use kvdepot_session::{Id, Listed, Reason, Sessions, export, export_ds4, import, import_ds4};

use crate::given::{Growing, Out, Plain, Text};
use crate::guard::{Failure, Status};
use crate::handle::{Made, Ref};
use crate::save::{ID_LEN, digits};
use crate::sessions::{Shown, c_text};

/// Entry of a list of sessions, `kvd_listed`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Row {
    /// Size of the struct in bytes, as the caller knows it.
    pub struct_size: usize,
    /// ID of the session.
    pub id: *const c_char,
    /// Note of the user.
    pub note: *const c_char,
    /// Number of tokens.
    pub tokens: u64,
    /// Size of the text in bytes.
    pub text_bytes: u64,
    /// Size of all pieces and objects in bytes.
    pub bytes: u64,
    /// Time of the save in seconds since 1970.
    pub created: u64,
    /// A `kvd_reason`.
    pub reason: u32,
    /// 1 if it is incomplete or failed verification.
    pub bad: u32,
}

// SAFETY: pointers and numbers.
unsafe impl Plain for Row {}

// SAFETY: `repr(C)`, and the size is the first field.
unsafe impl Growing for Row {
    const FIRST: usize = 64;
}

/// Result of a verification, `kvd_checked`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Checked {
    /// Size of the struct in bytes, as the caller knows it.
    pub struct_size: usize,
    /// Number of pieces and objects.
    pub blocks: u64,
    /// Size of the pieces and objects in bytes.
    pub bytes: u64,
    /// Number of pieces and objects that are missing or failed verification.
    pub missing: u64,
}

// SAFETY: numbers.
unsafe impl Plain for Checked {}

// SAFETY: `repr(C)`, and the size is the first field.
unsafe impl Growing for Checked {
    const FIRST: usize = 32;
}

/// A list of all sessions, as they were at the call.
#[derive(Debug)]
pub struct List(Vec<(CString, CString, Listed)>);

/// Converts a reason into a `kvd_reason`.
pub(crate) fn number(reason: Reason) -> u32 {
    match reason {
        Reason::Cold => 1,
        Reason::Continued => 2,
        Reason::Evict => 3,
        Reason::Shutdown => 4,
        _ => 0,
    }
}

fn id(sessions: &Sessions, given: &Text) -> Result<Id, Failure> {
    Ok(sessions.find(given.read("session")?)?)
}

/// Returns true for the format of ds4.
fn is_ds4(format: u32) -> Result<bool, Failure> {
    match format {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Failure::input(
            "format",
            other,
            "KVD_FILE_KVDEPOT or KVD_FILE_DS4",
        )),
    }
}

exported! {
    /// Implements `kvd_sessions_list`.
    fn kvd_sessions_list(sessions: Ref<Sessions>, list: Made<List>) {
        let list = list.making("list")?;
        let rows = sessions.get("sessions")?.list().into_iter();
        let row = |one: Listed| (c_text(&one.id.to_string()), c_text(&one.note), one);
        list.put(List(rows.map(row).collect()));
        Ok(())
    }

    /// Implements `kvd_list_len`.
    fn kvd_list_len(list: Ref<List>, len: Out<usize>) {
        len.place("len")?.put(list.get("list")?.0.len());
        Ok(())
    }

    /// Implements `kvd_list_row`.
    fn kvd_list_row(list: Ref<List>, at: usize, row: Out<Row>) {
        let row = row.sized("row")?;
        let all = &list.get("list")?.0;
        let Some((id, note, one)) = all.get(at) else {
            return Err(Failure::input("at", at, format!("less than {}", all.len())));
        };
        row.put(&Row {
            struct_size: 0,
            id: id.as_ptr(),
            note: note.as_ptr(),
            tokens: one.tokens as u64,
            text_bytes: one.text_bytes as u64,
            bytes: one.bytes,
            created: one.created,
            reason: number(one.reason),
            bad: one.is_bad.into(),
        });
        Ok(())
    }

    /// Implements `kvd_list_free`.
    fn kvd_list_free(list: Ref<List>) {
        drop(list.end());
        Ok(())
    }

    /// Implements `kvd_sessions_named`.
    fn kvd_sessions_named(sessions: Ref<Sessions>, session: Text, found: Made<Shown>) {
        let found = found.making("found")?;
        let sessions = sessions.get("sessions")?;
        found.put(Shown::of(sessions.named(id(sessions, &session)?)?));
        Ok(())
    }

    /// Implements `kvd_sessions_verify`.
    fn kvd_sessions_verify(sessions: Ref<Sessions>, session: Text, checked: Out<Checked>) {
        let told = match checked.wanted("checked")? {
            Some(_) => Some(checked.sized("checked")?),
            None => None,
        };
        let sessions = sessions.get("sessions")?;
        let checked = sessions.verify(id(sessions, &session)?)?;
        if let Some(told) = told {
            told.put(&Checked {
                struct_size: 0,
                blocks: checked.blocks,
                bytes: checked.bytes,
                missing: checked.missing.len() as u64,
            });
        }
        match checked.missing[..] {
            [] => Ok(()),
            _ => {
                let missing = checked.missing.join(", ");
                let message = format!("missing or corrupt: {missing}");
                Err(Failure::new(Status::NotWhole, message))
            }
        }
    }

    /// Implements `kvd_sessions_remove`.
    fn kvd_sessions_remove(sessions: Ref<Sessions>, session: Text) {
        let sessions = sessions.get("sessions")?;
        Ok(sessions.remove(id(sessions, &session)?)?)
    }

    /// Implements `kvd_sessions_export`.
    fn kvd_sessions_export(
        sessions: Ref<Sessions>, session: Text, path: Text, format: u32, bytes: Out<u64>,
    ) {
        let bytes = bytes.wanted("bytes")?;
        let sessions = sessions.get("sessions")?;
        let id = id(sessions, &session)?;
        let path = Path::new(path.read("path")?);
        let written = match is_ds4(format)? {
            true => export_ds4(sessions, id, path)?,
            false => export(sessions, id, path)?,
        };
        if let Some(bytes) = bytes {
            bytes.put(written);
        }
        Ok(())
    }

    /// Implements `kvd_sessions_import`. `id` is an array of `ID_LEN` bytes.
    fn kvd_sessions_import(
        sessions: Ref<Sessions>, path: Text, format: u32, id: Out<c_char>,
    ) {
        id.wanted("id")?;
        let sessions = sessions.get("sessions")?;
        let path = Path::new(path.read("path")?);
        let imported = match is_ds4(format)? {
            true => import_ds4(sessions, path)?,
            false => import(sessions, path)?,
        };
        match id.wanted("id")? {
            Some(_) => id.fill("id", ID_LEN, &digits(&imported.id)),
            None => Ok(()),
        }
    }
}
