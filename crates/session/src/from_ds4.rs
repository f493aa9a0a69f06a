//! ds4's files as sessions, and sessions that were ds4's as files again, byte for byte.
//!
//! What grows with the tokens (ids, compressed rows, index rows) is cut into pieces; all the rest
//! of a payload is one object, and so are the file's head and its trailer.

use std::fs::File;
use std::io::{Cursor, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;

use kvdepot_store::{BlockBuffers, Buffer};

use crate::archive::{Imported, one, open_file};
use crate::ds4::{self, HEAD_LEN, Head, Layout, SHAPE_LEN, TEXT_AT};
use crate::error::{Error, io};
use crate::file::replace;
use crate::index::Id;
use crate::manifest::{Manifest, Named, Reason};
use crate::save::Checkpoint;
use crate::store::Sessions;

/// Names of the objects.
const HEAD: &str = "ds4 head";
const REST: &str = "ds4 rest";
const TRAILER: &str = "ds4 trailer";

/// Longest text that is kept to be found by.
const TEXT_MAX: u64 = 64 << 20;

/// Longest part that does not grow with the tokens.
const PART: u64 = crate::manifest::PART_MAX;

fn wrong(path: &Path) -> impl Fn(ds4::Error) -> Error + '_ {
    move |error| match error {
        ds4::Error::Io(source) => Error::Io {
            path: path.display().to_string(),
            source,
        },
        other => Error::malformed(path.display().to_string(), other.to_string()),
    }
}

/// Ranges of a payload that these tokens have completed, in their order.
fn rows_of(layout: &Layout, run: &Range<usize>) -> Vec<Range<u64>> {
    let run = run.start as u32..run.end as u32;
    let each = layout.parts().iter();
    each.filter_map(|part| part.rows_of(run.clone())).collect()
}

/// Ranges of a payload that do not grow. The first is what it says of itself.
fn rest_of(layout: &Layout) -> Vec<Range<u64>> {
    let parts = layout.parts().iter().filter(|part| part.row.is_none());
    parts.map(|part| part.bytes.clone()).collect()
}

fn take(file: &mut File, base: u64, ranges: &[Range<u64>]) -> std::io::Result<Vec<u8>> {
    let len: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    if len > PART {
        let reason = "a part that does not grow with the tokens, or a piece, is over 1GiB";
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, reason));
    }
    // It grows with what has come: a file need not have what it says.
    let mut bytes = Vec::new();
    for range in ranges {
        file.seek(SeekFrom::Start(base + range.start))?;
        file.take(range.end - range.start).read_to_end(&mut bytes)?;
    }
    match bytes.len() as u64 == len {
        true => Ok(bytes),
        false => Err(std::io::ErrorKind::UnexpectedEof.into()),
    }
}

fn fill(file: &mut File, base: u64, ranges: &[Range<u64>], bytes: &[u8]) -> std::io::Result<()> {
    let mut bytes = Cursor::new(bytes);
    for range in ranges {
        file.seek(SeekFrom::Start(base + range.start))?;
        let mut some = bytes.by_ref().take(range.end - range.start);
        std::io::copy(&mut some, file)?;
    }
    Ok(())
}

/// Saves a file of ds4 as an exact session, so that [`export_ds4`] can write it again byte for
/// byte.
///
/// Pieces hold the token IDs, compressed rows and index rows. The rest of the payload, the head and
/// the trailer are objects. The name of the file becomes the note of the session.
///
/// # Errors
/// * [`Error::Malformed`] if `from` is not a file of ds4 that [`ds4`] knows, or if its text exceeds
///   64 MiB or its trailer 1 GiB.
/// * [`Error::NotStored`] if the depot did not store a part.
/// * [`Error::Io`] if the file cannot be read, and [`Error::Depot`] if the depot fails.
pub fn import_ds4(sessions: &Sessions, from: &Path) -> Result<Imported, Error> {
    let (wrong, io) = (wrong(from), io(from));
    let (mut file, _) = open_file(from)?;
    let parts = ds4::parse(&mut file).map_err(&wrong)?;
    if parts.text.end - parts.text.start > TEXT_MAX {
        let reason = "its text is longer than 64MiB";
        return Err(Error::malformed(from.display().to_string(), reason));
    }
    let text = parts.read_text(&mut file).map_err(&wrong)?;
    let layout = Layout::read(&mut file, &parts).map_err(&wrong)?;
    let count = layout.shape().tokens;
    let tokens = layout.read_tokens(&mut file, 0..count).map_err(&wrong)?;
    let base = parts.payload.start;
    let rest = take(&mut file, base, &rest_of(&layout)).map_err(&io)?;
    let mut trailer = Vec::new();
    let mut stream = parts.trailer(&mut file).take(PART + 1);
    stream.read_to_end(&mut trailer).map_err(&io)?;
    if trailer.len() as u64 > PART {
        let reason = "its trailer is over 1GiB";
        return Err(Error::malformed(from.display().to_string(), reason));
    }
    let mut objects = vec![
        (HEAD, parts.head.encode().to_vec()),
        (REST, rest),
        (TRAILER, trailer),
    ];
    objects.retain(|(_, bytes)| !bytes.is_empty());
    let objects = objects.into_iter();
    let objects = objects.map(|(name, bytes)| (name.to_owned(), Buffer::from_vec(bytes)));
    let name = from.file_name().unwrap_or_default();
    let checkpoint = Checkpoint {
        tokens: &tokens,
        text: &text,
        reason: Reason::of_name(parts.head.reason.name()).unwrap_or(Reason::Asked),
        context_tokens: parts.head.context,
        objects: objects.collect(),
        note: name.to_string_lossy().into_owned(),
        created: parts.head.created,
        exact: true,
    };
    let rows = |runs: &[Range<usize>]| {
        let mut one = |run: &Range<usize>| {
            let bytes = take(&mut file, base, &rows_of(&layout, run));
            bytes.map(Buffer::from_vec).map_err(&io)
        };
        let blocks = runs
            .iter()
            .map(&mut one)
            .collect::<Result<Vec<_>, Error>>()?;
        Ok(BlockBuffers::whole(blocks))
    };
    let saved = sessions.save(checkpoint, Box::new(rows))?;
    Ok(Imported {
        id: saved.id,
        tokens: tokens.len(),
        bytes: parts.payload.end - parts.payload.start,
    })
}

/// Writes the session `id`, which came from ds4, to the file `to` in ds4's format.
///
/// Returns the size of the file in bytes. If the export fails, it leaves no file.
///
/// # Errors
/// * [`Error::Unknown`] if there is no session `id`.
/// * [`Error::Malformed`] if the session is incomplete or of another engine.
/// * [`Error::Io`] if the file cannot be written, and [`Error::Depot`] if the depot fails.
pub fn export_ds4(sessions: &Sessions, id: Id, to: &Path) -> Result<u64, Error> {
    let manifest = sessions.manifest(id)?;
    let refused = |reason: &str| Error::malformed(format!("session {id}"), reason);
    let part = |name: &str| object(sessions, (id, &manifest), name);
    let head = part(HEAD)?.ok_or_else(|| refused("the session was not imported from ds4"))?;
    let head: [u8; HEAD_LEN] = head
        .try_into()
        .map_err(|_| refused("the ds4 head of the session is not valid"))?;
    let head = Head::decode(&head).map_err(wrong(to))?;
    let rest = part(REST)?.ok_or_else(|| refused("the session is incomplete"))?;
    // One that has none does not name any.
    let trailer = part(TRAILER)?.unwrap_or_default();
    let base = TEXT_AT + manifest.text.len() as u64;
    let shape = rest.first_chunk::<SHAPE_LEN>();
    let shape = shape.ok_or_else(|| refused("the session is incomplete"))?;
    let layout = Layout::known(shape, base..base + head.payload_len).map_err(wrong(to))?;
    replace(to, |file| {
        let io = io(to);
        // The payload's place is nothing at first, and then filled.
        let nothing = std::io::repeat(0).take(head.payload_len);
        let written = ds4::write(&mut *file, &head, &manifest.text, nothing, &trailer[..]);
        let written = written.map_err(wrong(to))?;
        fill(file, base, &rest_of(&layout), &rest).map_err(&io)?;
        let keys = manifest.keys().into_iter().zip(&manifest.piece_bytes);
        let each = manifest.piece_tokens as usize;
        for (at, (key, bytes)) in keys.enumerate() {
            let block = one(sessions, &sessions.pieces, (key, *bytes), id)?;
            let run = at * each..((at + 1) * each).min(manifest.tokens.len());
            fill(file, base, &rows_of(&layout, &run), &block).map_err(&io)?;
        }
        file.flush().map_err(&io)?;
        Ok(written)
    })
}

/// An object of a session, where it names one.
fn object(
    sessions: &Sessions,
    (id, of): (Id, &Manifest),
    name: &str,
) -> Result<Option<Vec<u8>>, Error> {
    let mut named = of.objects.iter().zip(of.object_keys());
    let found = named.find(|(one, _)| one.name == name);
    let read =
        |(object, key): (&Named, _)| one(sessions, &sessions.objects, (key, object.bytes), id);
    found.map(read).transpose()
}
