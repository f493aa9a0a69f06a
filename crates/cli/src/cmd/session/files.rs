//! `kvdepot session` for sessions that are files: one, or a directory of them.

use std::path::Path;
use std::sync::Arc;

use kvdepot_session::Error as SessionError;
use kvdepot_session::file::{
    About, FileMover, FileOptions, FilesSpec, OpenedFile, SessionFile, SessionFiles, files_of,
    is_session_file,
};
use serde::Serialize;

use super::{Looked, Row, Shown, all_whole, say, say_none, session_table, shown_lines, verdict};
use crate::args::{SessionCommand, targets};
use crate::error::Error;
use crate::interrupt::Interrupt;
use crate::output::{Output, note};

/// A session's file, for scripts.
#[derive(Serialize)]
struct FileRow<'a> {
    file: String,
    #[serde(flatten)]
    row: Row<'a>,
}

/// The path of a file or a directory, which no pipeline and no socket looks like.
pub(super) fn path_of(depot: &str) -> Option<&Path> {
    let is_path = !depot.starts_with("unix:") && depot.contains(['/', '.']);
    is_path.then(|| Path::new(depot))
}

pub(super) fn run(
    command: &SessionCommand,
    path: &Path,
    interrupt: &Interrupt,
    output: &mut Output,
) -> Result<i32, Error> {
    let mover = FileMover::new(FileOptions::default())?;
    let all = |digits: Option<&str>| chosen(&mover, path, digits);
    match command {
        SessionCommand::Ls { .. } => {
            let found = all(None)?;
            say_none(found.len(), &nothing_in(path), output);
            ls(&found, output)
        }
        SessionCommand::Show { session, .. } => {
            let file = only(all(session.as_deref())?, session.as_deref())?;
            show(&file, output)
        }
        SessionCommand::Verify { session, .. } => {
            let found = all(session.as_deref())?;
            say_none(found.len(), &nothing_in(path), output);
            verify(found, interrupt, output)
        }
        SessionCommand::Rm { session, .. } => {
            let file = only(all(Some(session))?, Some(session))?;
            std::fs::remove_file(file.path()).map_err(Error::io(file.path()))?;
            say(output, "removed", file.id(), 0)
        }
        SessionCommand::Export {
            session, file, ds4, ..
        } => {
            if *ds4 {
                let allowed = "a session of a depot; import the file into a depot first";
                return Err(refused("--ds4", "a session file".into(), allowed));
            }
            let from = only(all(Some(session))?, Some(session))?;
            let written = from.copy_to(file)?;
            say(output, "written", from.id(), written)
        }
        SessionCommand::Save(_) | SessionCommand::Restore(_) => {
            let allowed = "a depot (kvdepot.sessions.open_files saves to files)";
            Err(refused("DEPOT", path.display().to_string(), allowed))
        }
        SessionCommand::Trim { to, .. } => {
            let allowed = "this option only with a depot; use rm to remove session files";
            Err(refused("--to", to.to_string(), allowed))
        }
        SessionCommand::Import { files, weights, .. } => {
            if let Some(weights) = weights {
                let allowed = "this option only when ds4 files are imported into a depot";
                return Err(refused("--weights", weights.clone(), allowed));
            }
            let salt = command.depot().salt.as_deref();
            for file in files {
                interrupt.check()?;
                let (id, len) = bring(&mover, path, file, salt)?;
                say(output, "saved", id, len)?;
            }
            Ok(crate::status::OK)
        }
    }
}

fn nothing_in(path: &Path) -> String {
    let path = path.display();
    format!("{path} is not a directory of the tier Posix, and contains no session files (*.kvs)")
}

fn refused(field: &'static str, value: String, allowed: &str) -> Error {
    Error::Usage {
        field,
        value,
        allowed: allowed.into(),
    }
}

/// Returns an error if something is at the path that this user cannot read.
fn refuse_unreadable(path: &Path) -> Result<(), Error> {
    let read = match path.metadata() {
        Ok(about) if about.is_file() => std::fs::File::open(path).map(drop),
        about => about.map(drop),
    };
    match read {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io(path)(error)),
        _ => Ok(()),
    }
}

/// The files that are meant: one, those of a directory, or of these the one that digits name.
fn chosen(
    mover: &Arc<FileMover>,
    path: &Path,
    digits: Option<&str>,
) -> Result<Vec<OpenedFile>, Error> {
    // A script's variable that is empty names no session, and not the only one.
    if digits.is_some_and(str::is_empty) {
        return Err(refused(
            "SESSION",
            "an empty ID".into(),
            "a session ID, or a unique prefix of it",
        ));
    }
    if !path.is_dir() {
        if !is_session_file(path) {
            refuse_unreadable(path)?;
            let there = if path.exists() {
                ""
            } else {
                " (does not exist)"
            };
            let value = format!("{}{there}", path.display());
            return Err(refused("DEPOT", value, targets::DEPOT));
        }
        let one = SessionFile::open(mover, path)?;
        let others = |digits: &&str| {
            !one.id()
                .to_string()
                .starts_with(&digits.to_ascii_lowercase())
        };
        if let Some(digits) = digits.filter(others) {
            return Err(SessionError::Unknown(digits.to_owned()).into());
        }
        return Ok(vec![(path.to_owned(), Ok(one))]);
    }
    let mut all = files_of(mover, path)?;
    if let Some(digits) = digits {
        let digits = digits.to_ascii_lowercase();
        all.retain(|(path, file)| match file {
            Ok(file) => file.id().to_string().starts_with(&digits),
            // What cannot be read has its name alone.
            Err(_) => path
                .file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(&digits)),
        });
        if all.is_empty() {
            return Err(SessionError::Unknown(digits).into());
        }
    }
    Ok(all)
}

/// The one that is meant.
fn only(all: Vec<OpenedFile>, digits: Option<&str>) -> Result<SessionFile, Error> {
    let mut all = all.into_iter();
    match (all.next(), all.next()) {
        (Some((_, file)), None) => Ok(file?),
        _ => Err(refused(
            "SESSION",
            digits.unwrap_or("missing").to_owned(),
            "a prefix that matches only one session ID in the directory",
        )),
    }
}

fn row_of<'a>(file: &'a SessionFile, about: &'a About) -> Row<'a> {
    Row {
        session: file.id().to_string(),
        model: &about.space.model,
        dtype: &about.space.dtype,
        tokens: about.tokens.len(),
        text_bytes: about.text.len(),
        bytes: file.bytes(),
        reason: about.reason.name(),
        created: about.created,
        hits: None,
        used: None,
        note: &about.note,
        bad: false,
    }
}

fn ls(all: &[OpenedFile], output: &mut Output) -> Result<i32, Error> {
    let (mut bad, mut rows) = (0, Vec::new());
    for (path, file) in all {
        match file {
            Ok(file) => rows.push(FileRow {
                file: path.display().to_string(),
                row: row_of(file, file.about()),
            }),
            Err(error) => {
                bad += 1;
                note(&error.to_string());
            }
        }
    }
    rows.sort_by_key(|one| std::cmp::Reverse(one.row.created));
    match output.is_json() {
        true => rows.iter().try_for_each(|row| output.object(row))?,
        false => output.table(&session_table(rows.into_iter().map(|one| one.row)))?,
    }
    Ok(match bad {
        0 => crate::status::OK,
        _ => crate::status::PROBLEMS,
    })
}

fn show(file: &SessionFile, output: &mut Output) -> Result<i32, Error> {
    let about = file.about();
    shown_lines(
        Shown {
            row: row_of(file, about),
            weights: about.space.weights.as_deref(),
            context_tokens: about.context_tokens,
            piece_tokens: about.piece_tokens,
            pieces: about.piece_bytes.len(),
            objects: about.objects.clone(),
            text: String::from_utf8_lossy(&about.text).into_owned(),
        },
        output,
    )
}

fn verify(all: Vec<OpenedFile>, interrupt: &Interrupt, output: &mut Output) -> Result<i32, Error> {
    let mut bad = 0;
    for (path, file) in all {
        interrupt.check()?;
        let (name, checked) = match file {
            Ok(file) => (file.id().to_string(), file.verify()?),
            Err(error) => {
                bad += 1;
                note(&error.to_string());
                continue;
            }
        };
        bad += u64::from(!checked.missing.is_empty());
        let name = match output.is_json() {
            true => name,
            false => format!("{name} ({})", path.display()),
        };
        verdict(
            &Looked {
                session: name,
                blocks: checked.blocks,
                bytes: checked.bytes,
                missing: &checked.missing,
            },
            output,
        )?;
    }
    all_whole(bad, output)
}

/// Copies a file into the directory.
fn bring(
    mover: &Arc<FileMover>,
    path: &Path,
    file: &Path,
    salt: Option<&str>,
) -> Result<(kvdepot_session::Id, u64), Error> {
    let opened = SessionFile::open(mover, file)?;
    let about = opened.about();
    let salt = salt.filter(|_| about.space.is_salted);
    let spec = FilesSpec {
        namespace: about.spec(salt.map(str::to_owned)),
        // Whoever copies by hand sees to the space.
        capacity: u64::MAX,
        evicts: false,
        options: FileOptions::default(),
    };
    let id = SessionFiles::open(path, spec)?.import(file)?;
    Ok((id, opened.bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_told_from_pipelines_and_sockets() {
        for path in [
            "/mnt/sessions",
            "./sessions",
            "a.kvs",
            "sessions/a.kvs",
            ".",
        ] {
            assert!(path_of(path).is_some(), "{path}");
        }
        for other in ["Posix", "Cache|Posix", "unix:/run/kvdepot.sock"] {
            assert!(path_of(other).is_none(), "{other}");
        }
    }
}
