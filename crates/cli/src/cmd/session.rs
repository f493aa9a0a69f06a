//! `kvdepot session`: whole conversations in a depot, or in files.

mod files;
mod payload;

use std::io::Read;
use std::path::Path;

use kvdepot_session::{
    Checked, Error as SessionError, Id, Imported, Listed, PIECE_TOKENS_MAX, Sessions, Spec,
    Trimmed, Usage, ds4, export, export_ds4, import, import_ds4, look,
};
use kvdepot_store::config::set;
use kvdepot_store::{Config, Depot, NamespaceSpec};
use serde::Serialize;
use serde_json::Value;

use super::one_line;
use super::options;
use crate::args::{InDepot, Session, SessionCommand};
use crate::error::Error;
use crate::interrupt::Interrupt;
use crate::output::{Output, Table, bytes, count, note, some, utc};

/// Tokens of a piece of what comes from ds4: some 7 MB.
const PIECE_TOKENS: u64 = 512;

/// The pipeline of a depot that is named by its directory.
const DIRECTORY: &str = "Posix";

/// Tokens of a piece, as they were given.
fn piece_tokens(given: Option<usize>) -> Result<u64, Error> {
    let count = given.map_or(PIECE_TOKENS, |count| count as u64);
    match count <= PIECE_TOKENS_MAX.into() {
        true => Ok(count),
        false => Err(Error::Usage {
            field: "--piece-tokens",
            value: count.to_string(),
            allowed: format!("1 to {PIECE_TOKENS_MAX}"),
        }),
    }
}

/// A session, for scripts.
#[derive(Serialize)]
struct Row<'a> {
    session: String,
    model: &'a str,
    dtype: &'a str,
    tokens: usize,
    text_bytes: usize,
    bytes: u64,
    reason: &'static str,
    created: u64,
    /// Of a file it is not known.
    hits: Option<u64>,
    used: Option<u64>,
    note: &'a str,
    bad: bool,
}

impl<'a> Row<'a> {
    fn of(sessions: &'a Sessions, listed: &'a Listed, usage: Usage) -> Row<'a> {
        Row {
            session: listed.id.to_string(),
            model: &sessions.space().model,
            dtype: &sessions.space().dtype,
            tokens: listed.tokens,
            text_bytes: listed.text_bytes,
            bytes: listed.bytes,
            reason: listed.reason.name(),
            created: listed.created,
            hits: Some(usage.hits),
            used: Some(usage.used),
            note: &listed.note,
            bad: listed.is_bad,
        }
    }
}

pub(crate) fn run(args: &Session, output: &mut Output) -> Result<i32, Error> {
    let interrupt = Interrupt::catch()?;
    let path = files::path_of(&args.command.depot().depot);
    if let Some(path) = path.filter(|path| !is_depot(path)) {
        return files::run(&args.command, path, &interrupt, output);
    }
    let makes = matches!(
        args.command,
        SessionCommand::Import { .. } | SessionCommand::Save(_)
    );
    let depot = open(args.command.depot(), path, makes, &interrupt)?;
    let done = perform(args, &depot, &interrupt, output);
    depot.close();
    done
}

fn perform(
    args: &Session,
    depot: &Depot,
    interrupt: &Interrupt,
    output: &mut Output,
) -> Result<i32, Error> {
    let salt = args.command.depot().salt.as_deref();
    match &args.command {
        SessionCommand::Ls { .. } => ls(&Sessions::all(depot, salt)?, output),
        SessionCommand::Show { session, .. } => {
            let all = Sessions::all(depot, salt)?;
            let session = session.as_deref().ok_or_else(|| Error::Usage {
                field: "SESSION",
                value: "missing".into(),
                allowed: "a session ID, or a unique prefix of it".into(),
            })?;
            let (sessions, id) = find(&all, session)?;
            show(sessions, id, output)
        }
        SessionCommand::Verify { session, .. } => {
            let all = Sessions::all(depot, salt)?;
            let wanted = match session {
                Some(session) => vec![find(&all, session)?],
                None => all.iter().flat_map(of_all).collect(),
            };
            say_none(wanted.len(), "no sessions in this depot", output);
            verify(&wanted, interrupt, output)
        }
        SessionCommand::Rm { session, .. } => {
            let all = Sessions::all(depot, salt)?;
            let (sessions, id) = find(&all, session)?;
            sessions.remove(id)?;
            say(output, "removed", id, 0)
        }
        SessionCommand::Trim { to, .. } => {
            trim(&Sessions::all(depot, salt)?, *to, interrupt, output)
        }
        SessionCommand::Save(state) => payload::save(state, depot, interrupt, output),
        SessionCommand::Restore(state) => payload::restore(state, depot, interrupt, output),
        SessionCommand::Export {
            session, file, ds4, ..
        } => {
            let all = Sessions::all(depot, salt)?;
            let (sessions, id) = find(&all, session)?;
            let written = match ds4 {
                true => export_ds4(sessions, id, file)?,
                false => export(sessions, id, file)?,
            };
            say(output, "written", id, written)
        }
        SessionCommand::Import {
            files,
            weights,
            piece_tokens,
            ..
        } => {
            for file in files {
                interrupt.check()?;
                let piece_tokens = self::piece_tokens(*piece_tokens)?;
                let ways = (weights.as_deref(), piece_tokens, salt);
                let imported = bring(depot, file, ways)?;
                say(output, "saved", imported.id, imported.bytes)?;
            }
            Ok(crate::status::OK)
        }
    }
}

/// A path that nothing is at was mistyped: opened, it would be made, and have no sessions. So it
/// is with a directory that is not a depot's.
fn refuse_absent(all: &Value) -> Result<(), Error> {
    for (section, options) in all.as_object().into_iter().flatten() {
        let path = options.get("path").and_then(Value::as_str);
        let is_absent = |path: &Path| match section.as_str() {
            "posix" if path.is_dir() => !path.join("settings").exists(),
            _ => !path.exists(),
        };
        if let Some(path) = path.filter(|path| is_absent(Path::new(path))) {
            return Err(options::refused(
                "--option",
                &format!("{section}.path={path}"),
                "the path of an existing depot",
            ));
        }
    }
    Ok(())
}

/// Returns true if a path is the directory of a file tier.
fn is_depot(path: &Path) -> bool {
    path.join("settings").is_file() && path.join("blocks").is_dir()
}

/// Opens the depot, that of a directory where `path` is one; one that is not there only where
/// something is to be saved.
fn open(
    args: &InDepot,
    path: Option<&Path>,
    makes: bool,
    interrupt: &Interrupt,
) -> Result<Depot, Error> {
    if let Some(socket) = args.depot.strip_prefix("unix:") {
        return Ok(kvdepot_service::connect(Path::new(socket), None)?);
    }
    let path = path.map(|path| path.display().to_string());
    let pipeline = match path {
        Some(_) => DIRECTORY,
        None => &args.depot,
    };
    let beside = |name: &str| match name {
        "pipeline" => Some(pipeline.to_owned()),
        "posix.path" => path.clone(),
        _ => None,
    };
    let file = args.config.as_deref();
    let mut all = options::read(file, &args.options, Some(pipeline), beside)?;
    if let Some(path) = &path {
        set(&mut all, "posix.path", path.as_str().into());
    }
    // Nobody attaches to a command that ends at once.
    set(&mut all, "socket", "off".into());
    if !makes {
        refuse_absent(&all)?;
    }
    let config = Config::from_value(&all)?;
    Ok(interrupt.during(|| kvdepot_service::open(&config))?)
}

fn of_all(sessions: &Sessions) -> Vec<(&Sessions, Id)> {
    let each = sessions.list().into_iter();
    each.map(|listed| (sessions, listed.id)).collect()
}

/// The session that digits name.
fn find<'a>(all: &'a [Sessions], digits: &str) -> Result<(&'a Sessions, Id), Error> {
    let mut found = all
        .iter()
        .filter_map(|sessions| match sessions.find(digits) {
            Err(SessionError::Unknown(_)) => None,
            other => Some(other.map(|id| (sessions, id))),
        });
    match (found.next(), found.next()) {
        (Some(one), None) => Ok(one?),
        (None, _) => Err(SessionError::Unknown(digits.to_owned()).into()),
        (Some(_), Some(_)) => Err(Error::Usage {
            field: "SESSION",
            value: digits.to_owned(),
            allowed: "a prefix that matches only one session ID".into(),
        }),
    }
}

fn ls(all: &[Sessions], output: &mut Output) -> Result<i32, Error> {
    let mut listed: Vec<(&Sessions, Vec<Listed>, Vec<Usage>)> = Vec::new();
    for sessions in all {
        let some = sessions.list();
        let ids: Vec<Id> = some.iter().map(|one| one.id).collect();
        listed.push((sessions, some, sessions.usage(&ids)?));
    }
    let rows = listed.iter().flat_map(|(sessions, some, usage)| {
        let each = some.iter().zip(usage);
        each.map(|(one, usage)| Row::of(sessions, one, *usage))
    });
    if output.is_json() {
        rows.into_iter().try_for_each(|row| output.object(&row))?;
        return Ok(crate::status::OK);
    }
    let rows: Vec<Row<'_>> = rows.collect();
    say_none(rows.len(), "no sessions in this depot", output);
    output.table(&session_table(rows.into_iter()))?;
    Ok(crate::status::OK)
}

/// Says to a person that a list is empty, and why.
fn say_none(count: usize, why: &str, output: &Output) {
    if count == 0 && !output.is_json() {
        note(why);
    }
}

/// Sessions, for people.
fn session_table<'a>(rows: impl Iterator<Item = Row<'a>>) -> Table {
    let head = [
        "session", "model", "dtype", ">tokens", ">size", "saved", "why", ">hits", "last hit",
        "note",
    ];
    let mut table = Table::new(&head);
    for row in rows {
        let said = if row.bad { "incomplete" } else { row.note };
        table.row([
            row.session[..16].to_owned(),
            one_line(row.model),
            one_line(row.dtype),
            count(row.tokens as u64),
            bytes(row.bytes),
            utc(row.created),
            row.reason.to_owned(),
            row.hits.map_or_else(|| "-".to_owned(), count),
            last_hit(row.used),
            one_line(said),
        ]);
    }
    table
}

fn last_hit(used: Option<u64>) -> String {
    match used {
        None => "-".to_owned(),
        Some(0) => "never".to_owned(),
        Some(used) => utc(used),
    }
}

/// Removes sessions of all models, each of which keeps its share of so many bytes.
fn trim(
    all: &[Sessions],
    to: u64,
    interrupt: &Interrupt,
    output: &mut Output,
) -> Result<i32, Error> {
    let looked = all.iter().map(|sessions| sessions.trim(u64::MAX, &[]));
    let have = looked.collect::<Result<Vec<Trimmed>, SessionError>>()?;
    let total: u64 = have.iter().map(|one| one.bytes).sum();
    for (sessions, have) in all.iter().zip(have) {
        interrupt.check()?;
        let share = u128::from(have.bytes) * u128::from(to) / u128::from(total.max(1));
        let most = if total <= to { u64::MAX } else { share as u64 };
        for id in sessions.trim(most, &[])?.removed {
            say(output, "removed", id, 0)?;
        }
    }
    Ok(crate::status::OK)
}

/// A session with its parts, for scripts.
#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    row: Row<'a>,
    weights: Option<&'a str>,
    context_tokens: u32,
    piece_tokens: u32,
    pieces: usize,
    objects: Vec<(String, u64)>,
    text: String,
}

fn show(sessions: &Sessions, id: Id, output: &mut Output) -> Result<i32, Error> {
    let manifest = sessions.manifest(id)?;
    let listed = sessions.list();
    let Some(listed) = listed.iter().find(|one| one.id == id) else {
        return Err(SessionError::Unknown(id.to_string()).into());
    };
    let usage = sessions.usage(&[id])?.first().copied().unwrap_or_default();
    let objects = manifest.objects.iter();
    let shown = Shown {
        row: Row::of(sessions, listed, usage),
        weights: manifest.space.weights.as_deref(),
        context_tokens: manifest.context_tokens,
        piece_tokens: manifest.piece_tokens,
        pieces: manifest.piece_bytes.len(),
        objects: objects.map(|one| (one.name.clone(), one.bytes)).collect(),
        text: String::from_utf8_lossy(&manifest.text).into_owned(),
    };
    shown_lines(shown, output)
}

fn shown_lines(shown: Shown<'_>, output: &mut Output) -> Result<i32, Error> {
    if output.is_json() {
        output.object(&shown)?;
        return Ok(crate::status::OK);
    }
    let weights = shown
        .weights
        .map_or_else(String::new, |name| format!(", weights {name}"));
    let room = match shown.context_tokens {
        0 => String::new(),
        tokens => format!(" of {} (context size)", count(tokens.into())),
    };
    let lines = [
        format!("session {}", shown.row.session),
        format!("model {}, {}{weights}", shown.row.model, shown.row.dtype),
        format!(
            "{}{room}, saved {} ({})",
            some(shown.row.tokens as u64, "token"),
            utc(shown.row.created),
            shown.row.reason
        ),
        format!(
            "{} of {} each, {}",
            some(shown.pieces as u64, "piece"),
            some(shown.piece_tokens.into(), "token"),
            bytes(shown.row.bytes)
        ),
    ];
    for line in lines {
        output.line(&line)?;
    }
    if let Some(hits) = shown.row.hits {
        let last = last_hit(shown.row.used);
        output.line(&format!("restored {}, last: {last}", some(hits, "time")))?;
    }
    for (name, len) in &shown.objects {
        output.line(&format!("object {name:?}, {}", bytes(*len)))?;
    }
    if !shown.text.is_empty() {
        output.line(&format!("text {:?}", one_line(&shown.text)))?;
    }
    Ok(crate::status::OK)
}

/// What a look at all of a session has shown, for scripts.
#[derive(Serialize)]
struct Looked<'a> {
    session: String,
    blocks: u64,
    bytes: u64,
    missing: &'a [String],
}

fn verify(
    wanted: &[(&Sessions, Id)],
    interrupt: &Interrupt,
    output: &mut Output,
) -> Result<i32, Error> {
    let mut bad = 0;
    for (sessions, id) in wanted {
        interrupt.check()?;
        let checked: Checked = sessions.verify(*id)?;
        bad += u64::from(!checked.missing.is_empty());
        let looked = Looked {
            session: id.to_string(),
            blocks: checked.blocks,
            bytes: checked.bytes,
            missing: &checked.missing,
        };
        verdict(&looked, output)?;
    }
    all_whole(bad, output)
}

/// Ends a look at sessions of which so many are not whole.
fn all_whole(bad: u64, output: &mut Output) -> Result<i32, Error> {
    output.flush()?;
    if bad > 0 {
        note(&format!("{} incomplete", some(bad, "session")));
        return Ok(crate::status::PROBLEMS);
    }
    Ok(crate::status::OK)
}

fn verdict(looked: &Looked<'_>, output: &mut Output) -> Result<(), Error> {
    if output.is_json() {
        return output.object(looked);
    }
    let verdict = match looked.missing.is_empty() {
        true => "complete".to_owned(),
        false => format!("missing or corrupt: {}", looked.missing.join(", ")),
    };
    let (name, size) = (&looked.session, bytes(looked.bytes));
    let blocks = some(looked.blocks, "block");
    output.line(&format!("{name}: {blocks}, {size}: {verdict}"))
}

/// What was done with a session, for scripts.
#[derive(Serialize)]
struct Done {
    event: &'static str,
    session: String,
    bytes: u64,
}

fn say(output: &mut Output, event: &'static str, id: Id, len: u64) -> Result<i32, Error> {
    let done = Done {
        event,
        session: id.to_string(),
        bytes: len,
    };
    match output.is_json() {
        true => output.object(&done)?,
        false if len > 0 => output.line(&format!("{event} {id}, {}", bytes(len)))?,
        false => output.line(&format!("{event} {id}"))?,
    }
    Ok(crate::status::OK)
}

/// Saves one file's session.
fn bring(
    depot: &Depot,
    file: &Path,
    (weights, piece_tokens, salt): (Option<&str>, u64, Option<&str>),
) -> Result<Imported, Error> {
    let mut magic = Vec::new();
    let read = std::fs::File::open(file).and_then(|file| file.take(3).read_to_end(&mut magic));
    read.map_err(Error::unreadable("FILE", file))?;
    if magic == ds4::MAGIC {
        let mut opened = std::fs::File::open(file).map_err(Error::io(file))?;
        let parts = ds4::parse(&mut opened).map_err(|error| malformed(file, &error))?;
        let weights = weights.ok_or_else(|| Error::Usage {
            field: "--weights",
            value: "missing".into(),
            allowed: "text that identifies the weights of ds4 files".into(),
        })?;
        let spec = NamespaceSpec {
            model: format!("ds4 {}", parts.head.model),
            dtype: format!("q{}", parts.head.quant_bits),
            block_tokens: piece_tokens,
            weights: Some(weights.to_owned()),
            salt: salt.map(str::to_owned),
            ..NamespaceSpec::default()
        };
        let sessions = Sessions::open(depot.clone(), &Spec::new(spec))?;
        return Ok(import_ds4(&sessions, file)?);
    }
    if let Some(weights) = weights {
        return Err(Error::Usage {
            field: "--weights",
            value: weights.to_owned(),
            allowed:
                "this option only for ds4 files; an exported session contains this information"
                    .into(),
        });
    }
    let manifest = look(file)?;
    let salt = salt.filter(|_| manifest.space.is_salted);
    let spec = manifest
        .space
        .spec(manifest.piece_tokens, salt.map(str::to_owned));
    let sessions = Sessions::open(depot.clone(), &Spec::new(spec))?;
    Ok(import(&sessions, file)?)
}

fn malformed(file: &Path, error: &ds4::Error) -> SessionError {
    SessionError::Malformed {
        what: file.display().to_string(),
        reason: error.to_string(),
    }
}
