//! `kvdepot session save` and `restore`: a state in files, into a depot and out of it.

use std::cell::RefCell;
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use kvdepot_host::dir::{Before, Dir};
use kvdepot_session::{Checkpoint, Error as SessionError, Found, Reason, Sessions, Sink, Spec};
use kvdepot_store::{Buffer, Depot, NamespaceSpec};
use serde::Serialize;

use super::{find, piece_tokens};
use crate::args::{Restored, Saved};
use crate::error::Error;
use crate::interrupt::Interrupt;
use crate::output::{Output, Progress, bytes, note, some};

/// Bytes that are read or written between two looks at Ctrl-C.
const CHUNK: usize = 4 << 20;

/// Bytes of pieces that are read at a time.
const READ: u64 = 64 << 20;

/// Sessions that are tried, one after the other, where they are not whole.
const TRIED: usize = 8;

/// What was done, for scripts.
#[derive(Serialize)]
struct Done {
    event: &'static str,
    session: String,
    tokens: usize,
    cached_tokens: usize,
    cache_write_tokens: usize,
    bytes: u64,
}

fn usage(field: &'static str, value: impl ToString, allowed: impl Into<String>) -> Error {
    Error::Usage {
        field,
        value: value.to_string(),
        allowed: allowed.into(),
    }
}

fn read(field: &'static str, path: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(Error::unreadable(field, path))
}

/// The tokens of a file.
fn tokens_of(path: &Path) -> Result<Vec<u32>, Error> {
    let all = read("--tokens", path)?;
    let refuse = |allowed: String| usage("--tokens", path.display(), allowed);
    let tokens = match path.extension().is_some_and(|end| end == "json") {
        true => serde_json::from_slice(&all)
            .map_err(|error| refuse(format!("a JSON list of token IDs below 2^32 ({error})")))?,
        false => {
            let (words, rest) = all.as_chunks::<4>();
            if !rest.is_empty() {
                let allowed = "a file of 4-byte little-endian token IDs, or a .json file with a \
                               list of token IDs";
                return Err(refuse(allowed.into()));
            }
            words
                .iter()
                .map(|word| u32::from_le_bytes(*word))
                .collect::<Vec<u32>>()
        }
    };
    match tokens.is_empty() {
        true => Err(refuse("a file with at least one token".into())),
        false => Ok(tokens),
    }
}

/// Bytes of a token's rows, by the file that has those of so many.
fn row_bytes(file: &File, args: &Saved, tokens: usize) -> Result<u64, Error> {
    let about = file.metadata().map_err(Error::io(&args.rows))?;
    if !about.is_file() {
        return Err(usage("--rows", args.rows.display(), "a regular file"));
    }
    let (len, count) = (about.len(), tokens as u64);
    let each = args.row_bytes.unwrap_or(len / count);
    if each == 0 || each.checked_mul(count) != Some(len) {
        let allowed = match args.row_bytes {
            Some(each) => format!("{tokens} tokens of {each} bytes each"),
            None => format!("a size that is a multiple of {tokens}, the number of tokens"),
        };
        return Err(usage("--rows", format!("{len} bytes"), allowed));
    }
    Ok(each)
}

fn objects_of(given: &[String]) -> Result<Vec<(String, Buffer)>, Error> {
    let each = given.iter().map(|given| {
        let named = given.split_once('=').filter(|(name, _)| !name.is_empty());
        let (name, path) = named.ok_or_else(|| usage("--object", given, "NAME=FILE"))?;
        Ok((
            name.to_owned(),
            Buffer::from_vec(read("--object", Path::new(path))?),
        ))
    });
    each.collect()
}

/// Copies the rows of runs of tokens.
fn copy(
    (file, path): (&File, &Path),
    (runs, row): (&[Range<usize>], u64),
    sink: &mut Sink,
    (progress, interrupt): (&Progress, &Interrupt),
) -> Result<(), Error> {
    let total = sink.left();
    let mut chunk = vec![0; CHUNK];
    for run in runs {
        let (mut at, end) = (run.start as u64 * row, run.end as u64 * row);
        while at < end {
            interrupt.check()?;
            let len = (end - at).min(CHUNK as u64) as usize;
            let some = chunk.get_mut(..len).unwrap_or_default();
            file.read_exact_at(some, at).map_err(Error::io(path))?;
            sink.write(some)?;
            at += len as u64;
            progress.set(total - sink.left(), total);
        }
    }
    // What is acknowledged is not interrupted any more.
    interrupt.check()
}

pub(super) fn save(
    args: &Saved,
    depot: &Depot,
    interrupt: &Interrupt,
    output: &mut Output,
) -> Result<i32, Error> {
    let tokens = tokens_of(&args.tokens)?;
    let file = File::open(&args.rows).map_err(Error::unreadable("--rows", &args.rows))?;
    let row = row_bytes(&file, args, tokens.len())?;
    let text = args
        .text
        .as_deref()
        .map(|path| read("--text", path))
        .transpose()?;
    let context = args.context_tokens.unwrap_or(0);
    let context_tokens = u32::try_from(context)
        .map_err(|_| usage("--context-tokens", context, "at most 4294967295"))?;
    let checkpoint = Checkpoint {
        tokens: &tokens,
        text: text.as_deref().unwrap_or_default(),
        reason: Reason::Asked,
        context_tokens,
        objects: objects_of(&args.objects)?,
        note: args.note.clone(),
        created: now(),
        exact: false,
    };
    let spec = NamespaceSpec {
        model: args.model.clone(),
        dtype: args.dtype.clone(),
        block_tokens: piece_tokens(args.piece_tokens)?,
        weights: args.weights.clone(),
        layout: args.layout.clone(),
        salt: args.depot.salt.clone(),
        ..NamespaceSpec::default()
    };
    let sessions = Sessions::open(depot.clone(), &Spec::new(spec))?;
    let progress = Progress::bytes("saving");
    let failed = RefCell::new(None);
    let saved = sessions.save_serialized(
        checkpoint,
        |run| run.len() as u64 * row,
        |runs, sink| {
            let from = (&file, &*args.rows);
            let copied = copy(from, (runs, row), sink, (&progress, interrupt));
            copied.map_err(|error| {
                *failed.borrow_mut() = Some(error);
                SessionError::Cancelled
            })
        },
    );
    drop(progress);
    if let Some(error) = failed.into_inner() {
        return Err(error);
    }
    let saved = saved?;
    let done = Done {
        event: "saved",
        session: saved.id.to_string(),
        tokens: tokens.len(),
        cached_tokens: saved.cached_tokens,
        cache_write_tokens: saved.cache_write_tokens,
        bytes: saved.bytes_written,
    };
    let (there, written) = (some(done.cached_tokens as u64, "token"), bytes(done.bytes));
    say(
        &done,
        &format!("({there} already stored), {written} written"),
        output,
    )
}

/// In Unix seconds.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

fn say(done: &Done, what: &str, output: &mut Output) -> Result<i32, Error> {
    match output.is_json() {
        true => output.object(done)?,
        false => output.line(&format!(
            "{} {}, {} {what}",
            done.event,
            done.session,
            some(done.tokens as u64, "token"),
        ))?,
    }
    Ok(crate::status::OK)
}

/// A file that nobody sees before all of it is there.
fn publish(
    (field, path): (&'static str, &Path),
    write: impl FnOnce(&mut File) -> Result<(), Error>,
) -> Result<(), Error> {
    let parent = path.parent().filter(|parent| *parent != Path::new(""));
    let name = path.file_name().and_then(|name| name.to_str());
    let allowed = "the path of a new file, or of a file to replace";
    let refuse = || usage(field, path.display(), allowed);
    let name = name.ok_or_else(refuse)?;
    if std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        return Err(refuse());
    }
    let dir = Dir::open(parent.unwrap_or_else(|| Path::new(".")))?;
    let temporary = dir.temporary()?;
    let fd = temporary.as_fd().try_clone_to_owned();
    write(&mut fd.map_err(Error::io(path))?.into())?;
    temporary.publish(name, Before::Goes)?;
    Ok(())
}

/// Runs of pieces that are read at a time.
fn batches(found: &Found) -> Vec<Range<usize>> {
    let mut batches: Vec<Range<usize>> = Vec::new();
    let mut read = 0;
    for (at, (_, len)) in found.pieces.iter().enumerate() {
        read += len;
        match batches.last_mut() {
            Some(last) if read <= READ => last.end = at + 1,
            _ => {
                read = *len;
                batches.push(at..at + 1);
            }
        }
    }
    batches
}

/// Writes a session's parts; false where one is not there, or does not verify.
fn write(
    args: &Restored,
    (sessions, found): (&Sessions, &Found),
    interrupt: &Interrupt,
) -> Result<bool, Error> {
    let total = found.pieces.iter().map(|(_, len)| len).sum();
    let progress = Progress::bytes("restoring");
    let mut objects: Vec<(PathBuf, Vec<u8>)> = Vec::new();
    if let Some(folder) = &args.objects {
        for (at, object) in found.objects.iter().enumerate() {
            let read = sessions.read_objects(found, at..at + 1)?.pop().flatten();
            let Some(read) = read else {
                return Ok(false);
            };
            objects.push((folder.join(&object.name), read));
        }
    }
    let mut is_whole = true;
    let mut written = 0;
    let put = |file: &mut File| {
        for some in batches(found) {
            interrupt.check()?;
            for rows in sessions.read_pieces(found, some)? {
                let Some(rows) = rows else {
                    is_whole = false;
                    return Err(SessionError::Cancelled.into());
                };
                file.write_all(&rows).map_err(Error::io(&args.rows))?;
                written += rows.len() as u64;
                progress.set(written, total);
            }
        }
        interrupt.check()
    };
    match publish(("--rows", &args.rows), put) {
        Err(_) if !is_whole => return Ok(false),
        published => published?,
    }
    for (path, bytes) in objects {
        publish(("--objects", &path), |file| {
            file.write_all(&bytes).map_err(Error::io(&path))
        })?;
    }
    Ok(true)
}

/// Refuses objects whose names would be other paths.
fn check_names(found: &Found, folder: &Path) -> Result<(), Error> {
    if !folder.is_dir() {
        return Err(usage(
            "--objects",
            folder.display(),
            "an existing directory",
        ));
    }
    let is_plain = |name: &str| {
        let mut parts = Path::new(name).components();
        matches!(parts.next(), Some(std::path::Component::Normal(one)) if one == name)
            && parts.next().is_none()
    };
    if let Some(one) = found.objects.iter().find(|one| !is_plain(&one.name)) {
        let value = format!("a directory for the object {:?}", one.name);
        let allowed =
            "objects whose names are file names; omit the option to restore without objects";
        return Err(usage("--objects", value, allowed));
    }
    let mut paths = found.objects.iter().map(|one| folder.join(&one.name));
    match paths.find(|path| path.is_dir()) {
        Some(path) => {
            let allowed = "the path of a new file, or of a file to replace";
            Err(usage("--objects", path.display(), allowed))
        }
        None => Ok(()),
    }
}

/// The sessions that were asked for, the best first.
fn wanted<'a>(args: &Restored, all: &'a [Sessions]) -> Result<Vec<(&'a Sessions, Found)>, Error> {
    if let Some(session) = &args.session {
        let (sessions, id) = find(all, session)?;
        return Ok(vec![(sessions, sessions.named(id)?)]);
    }
    let Some(path) = &args.tokens else {
        return Err(usage(
            "SESSION",
            "missing",
            "a session ID, a unique prefix of it, or --tokens",
        ));
    };
    let tokens = tokens_of(path)?;
    let mut found = Vec::new();
    for sessions in all {
        let some = sessions.lookup(&tokens, TRIED)?;
        found.extend(some.into_iter().map(|one| (sessions, one)));
    }
    let of = |one: &(&Sessions, Found)| one.0.space().clone();
    if found
        .iter()
        .any(|one| Some(of(one)) != found.first().map(of))
    {
        let allowed = "tokens that match sessions of one model only; give SESSION instead";
        return Err(usage("--tokens", path.display(), allowed));
    }
    found.sort_by_key(|(_, one)| std::cmp::Reverse(one.tokens.len()));
    match found.is_empty() {
        true => Err(SessionError::Unknown(format!(
            "whose tokens are a prefix of {}",
            path.display()
        ))
        .into()),
        false => Ok(found),
    }
}

pub(super) fn restore(
    args: &Restored,
    depot: &Depot,
    interrupt: &Interrupt,
    output: &mut Output,
) -> Result<i32, Error> {
    let all = Sessions::all(depot, args.depot.salt.as_deref())?;
    for (sessions, found) in wanted(args, &all)? {
        if let Some(folder) = &args.objects {
            check_names(&found, folder)?;
        }
        if !write(args, (sessions, &found), interrupt)? {
            note(&format!("session {} is incomplete", found.id));
            continue;
        }
        let done = Done {
            event: "restored",
            session: found.id.to_string(),
            tokens: found.tokens.len(),
            cached_tokens: found.tokens.len(),
            cache_write_tokens: 0,
            bytes: found.pieces.iter().map(|(_, len)| len).sum(),
        };
        sessions.count_use(found.id);
        return say(&done, &format!("({} of rows)", bytes(done.bytes)), output);
    }
    Ok(crate::status::PROBLEMS)
}
