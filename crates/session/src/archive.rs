//! A session of a depot as one file, and back.
//!
//! `export` writes a file of version 2 ([`file`](crate::file)). Files of version 1 are read still:
//! the eight bytes `kvsessar`, u32 version, u32 zero, u64 bytes of the manifest, the manifest; then
//! each piece and each object, in its order, without anything between; and last the BLAKE3 of all
//! before it. Little-endian.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use kvdepot_store::{BlockBuffers, Buffer, Key, Namespace};

use crate::chain::Link;
use crate::error::{Error, io, room};
use crate::file::{About, FileMover, FileOptions, MAGIC, Member, SessionFile, SessionWriter};
use crate::index::Id;
use crate::manifest::{Manifest, Named, PART_MAX};
use crate::store::{MANIFEST_MAX, Sessions, check_size, read_all};

/// The version that this file reads.
const VERSION: u32 = 1;
const HEAD: usize = 24;
const SUM: usize = 32;

/// Result of an import.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Imported {
    /// ID of the imported session in this depot.
    pub id: Id,
    /// Number of tokens of the session.
    pub tokens: usize,
    /// Size of the imported session, in bytes. [`import`] counts pieces and objects,
    /// [`import_ds4`](crate::import_ds4) the payload of the file.
    pub bytes: u64,
}

/// What is read, and its sum.
struct Summed<R> {
    inner: R,
    hasher: blake3::Hasher,
}

impl<R: Read> Summed<R> {
    fn take(&mut self, bytes: &mut [u8]) -> std::io::Result<()> {
        self.inner.read_exact(bytes)?;
        self.hasher.update(bytes);
        Ok(())
    }
}

/// Writes the session `id` to the file `to`, in the format of [`file`](crate::file).
///
/// Returns the size of the file in bytes. If the export fails, it leaves no file.
///
/// # Errors
/// * [`Error::Unknown`] if there is no session `id`.
/// * [`Error::Malformed`] if a part of the session is missing or fails checksum verification.
/// * [`Error::Io`] if the file cannot be written.
/// * [`Error::Depot`] if the depot fails.
pub fn export(sessions: &Sessions, id: Id, to: &Path) -> Result<u64, Error> {
    let manifest = sessions.manifest(id)?;
    let (mover, about) = (
        FileMover::new(FileOptions::default())?,
        About::from(manifest.clone()),
    );
    let mut writer = SessionWriter::of(&mover, to, about)?;
    let pieces = manifest.keys().into_iter();
    let pieces = pieces.zip(manifest.piece_bytes.iter().copied());
    for block in pieces {
        let bytes = one(sessions, &sessions.pieces, block, id)?;
        writer.put(Member::Piece, &[Buffer::from_vec(bytes)])?;
    }
    for (key, object) in manifest.object_keys().into_iter().zip(&manifest.objects) {
        let bytes = one(sessions, &sessions.objects, (key, object.bytes), id)?;
        let member = Member::Object(object.name.clone());
        writer.put(member, &[Buffer::from_vec(bytes)])?;
    }
    Ok(writer.finish()?.bytes_written)
}

/// A part of a session.
pub(crate) fn one(
    sessions: &Sessions,
    from: &Namespace,
    block: (Key, u64),
    id: Id,
) -> Result<Vec<u8>, Error> {
    let read = read_all(from, &[block], sessions.timeout)?;
    let bytes = read.into_iter().next().flatten();
    bytes.ok_or_else(|| {
        sessions.index.write().gone(id);
        Error::malformed(format!("session {id}"), "a part is missing or corrupt")
    })
}

/// Opens a file that is to be read; its bytes. Who opens a pipe waits for who writes into it.
pub(crate) fn open_file(path: &Path) -> Result<(File, u64), Error> {
    let about = std::fs::metadata(path).map_err(io(path))?;
    if !about.is_file() {
        return Err(Error::input("file", path.display(), "a regular file"));
    }
    let file = File::open(path).map_err(io(path))?;
    let len = file.metadata().map_err(io(path))?.len();
    Ok((file, len))
}

/// A file that is read, with all that is said before its pieces.
pub(crate) struct Archive<'a, R> {
    path: &'a Path,
    input: Summed<BufReader<R>>,
    pub(crate) manifest: Manifest,
}

impl Archive<'_, File> {
    fn open(path: &Path) -> Result<Archive<'_, File>, Error> {
        let (file, len) = open_file(path)?;
        Archive::read(path, file, len)
    }
}

impl<R: Read + Seek> Archive<'_, R> {
    /// Reads one of so many bytes. All of it is read once first: nothing of a file that has changed
    /// is used.
    pub(crate) fn read(path: &Path, mut file: R, len: u64) -> Result<Archive<'_, R>, Error> {
        let wrong = |reason: &str| Error::malformed(path.display().to_string(), reason);
        let mut head = [0; HEAD];
        let begin = file.read_exact(&mut head);
        begin.map_err(|error| cut(path, error))?;
        let u32_at =
            |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().unwrap_or_default());
        if head[..8] != MAGIC[..] {
            return Err(wrong("it is not a session file"));
        }
        if u32_at(8) != VERSION {
            return Err(wrong("this release does not support its format version"));
        }
        file.rewind().map_err(io(path))?;
        if !is_whole(&mut file, len).map_err(|error| cut(path, error))? {
            return Err(wrong("it is corrupt or truncated"));
        }
        file.seek(SeekFrom::Start(HEAD as u64)).map_err(io(path))?;
        let encoded = u64::from_le_bytes(head[16..].try_into().unwrap_or_default());
        if encoded > MANIFEST_MAX.min(len) {
            return Err(wrong("its manifest is too long"));
        }
        let mut input = Summed {
            inner: BufReader::with_capacity(1 << 20, file),
            hasher: blake3::Hasher::new(),
        };
        input.hasher.update(&head);
        let mut bytes = room(encoded, path)?;
        bytes.resize(encoded as usize, 0);
        input.take(&mut bytes).map_err(|error| cut(path, error))?;
        let manifest = Manifest::decode(&bytes)?;
        if manifest.bytes() + encoded + (HEAD + SUM) as u64 != len {
            return Err(wrong("its length does not match its parts"));
        }
        Ok(Archive {
            path,
            input,
            manifest,
        })
    }
}

fn cut(path: &Path, error: std::io::Error) -> Error {
    match error.kind() {
        std::io::ErrorKind::UnexpectedEof => {
            Error::malformed(path.display().to_string(), "it is truncated")
        }
        _ => io(path)(error),
    }
}

/// Whether a file is one of version 1; any other is read as one of version 2, or refused.
pub(crate) fn is_first_version(path: &Path) -> Result<bool, Error> {
    let (mut file, _) = crate::file::open_file(path, false)?;
    let mut begin = [0; 12];
    match file.read_exact(&mut begin) {
        Ok(()) => Ok(begin[..8] == MAGIC[..] && begin[8..] == VERSION.to_le_bytes()),
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(io(path)(error)),
    }
}

/// Returns the description of a session file of version 1 or 2.
///
/// A file of version 1 is read completely for this.
///
/// # Errors
/// * [`Error::Malformed`] if `from` is not a session file, is truncated, or has changed.
/// * [`Error::Io`] if the file cannot be read.
pub fn look(from: &Path) -> Result<About, Error> {
    if is_first_version(from)? {
        return Ok(Archive::open(from)?.manifest.into());
    }
    let mover = FileMover::new(FileOptions::default())?;
    Ok(SessionFile::open(&mover, from)?.about().clone())
}

/// Saves the session in the file `from`, of version 1 or 2, to a depot, bit for bit.
///
/// The whole file is verified before the first byte is stored. The session replaces one with the
/// same tokens.
///
/// # Errors
/// * [`Error::Malformed`] if `from` is not a session file, is truncated, or has changed.
/// * [`Error::Input`] if the session belongs to another namespace, or is not cut by tokens, or if a
///   part is larger than 1 GiB or the session too large for the depot.
/// * [`Error::NotStored`] if the depot did not store a part.
/// * [`Error::Io`] if the file cannot be read, and [`Error::Depot`] if the depot fails.
pub fn import(sessions: &Sessions, from: &Path) -> Result<Imported, Error> {
    if is_first_version(from)? {
        return import_first(sessions, from);
    }
    let mover = FileMover::new(FileOptions::default())?;
    let file = SessionFile::open(&mover, from)?;
    let about = file.about();
    refuse_others(sessions, about)?;
    if about.piece_bytes.is_empty() {
        let allowed = "a session whose rows are cut by tokens; keep other sessions as files";
        return Err(Error::input("file", from.display(), allowed));
    }
    if let Some(bytes) = about.members().find(|bytes| *bytes > PART_MAX) {
        let allowed = "pieces and objects of at most 1GiB";
        return Err(Error::input(
            "file",
            format!("a part of {bytes} bytes"),
            allowed,
        ));
    }
    // All of it is looked at before a byte is stored.
    if let Some(bad) = file.verify()?.missing.first() {
        let reason = format!("{bad} fails checksum verification");
        return Err(Error::malformed(from.display().to_string(), reason));
    }
    check_size(sessions.size_max(), about.members())?;
    let before = sessions.index.read().same(&about.tokens);
    let mut manifest = about.as_manifest();
    (manifest.pieces_in, manifest.objects_in) = (sessions.pieces.id().0, sessions.objects.id().0);
    let links = manifest.links();
    let take = |member: usize, bytes: u64| {
        let mut block = room(bytes, from)?;
        file.read(member, &mut |some| {
            block.extend_from_slice(some);
            Ok(())
        })?;
        Ok::<_, Error>(block)
    };
    let pieces = manifest.piece_bytes.iter().copied().zip(&links);
    for (at, (bytes, link)) in pieces.enumerate() {
        let block = take(at, bytes)?;
        let key = match about.exact.binary_search(&(at as u32)).is_ok() {
            // It stays one that nobody else's can take the place of.
            true => Some(sessions.put_variant(*link, block)?),
            false => sessions.put_piece(*link, block)?,
        };
        if let Some(key) = key {
            manifest.variants.push((at as u32, key.0));
        }
    }
    let end = links.last().copied();
    let end =
        end.ok_or_else(|| Error::malformed(from.display().to_string(), "it has no tokens"))?;
    for (at, object) in manifest.objects.iter_mut().enumerate() {
        let block = take(links.len() + at, object.bytes)?;
        object.sum = *blake3::hash(&block).as_bytes();
        put_object(sessions, end, object, block)?;
    }
    finish(sessions, end, &manifest, &before)
}

fn put_object(sessions: &Sessions, end: Link, object: &Named, block: Vec<u8>) -> Result<(), Error> {
    let key = end.object(&object.name, &object.sum);
    let buffers = BlockBuffers::whole([Buffer::from_vec(block)]);
    sessions.put("an object", &sessions.objects, vec![key], buffers)
}

fn finish(
    sessions: &Sessions,
    end: Link,
    manifest: &Manifest,
    before: &[Id],
) -> Result<Imported, Error> {
    let (id, _) = sessions.put_manifest(end, manifest, before)?;
    Ok(Imported {
        id,
        tokens: manifest.tokens.len(),
        bytes: manifest.bytes(),
    })
}

fn import_first(sessions: &Sessions, from: &Path) -> Result<Imported, Error> {
    let Archive {
        path,
        mut input,
        mut manifest,
    } = Archive::open(from)?;
    let wrong = |reason: &str| Error::malformed(path.display().to_string(), reason);
    refuse_others(sessions, &About::from(manifest.clone()))?;
    let objects = manifest.objects.iter().map(|one| one.bytes);
    let all = manifest.piece_bytes.iter().copied().chain(objects);
    check_size(sessions.size_max(), all)?;
    let before = sessions.index.read().same(&manifest.tokens);
    let links = manifest.links();
    let end = links
        .last()
        .copied()
        .ok_or_else(|| wrong("it has no tokens"))?;
    let mut take = |bytes: u64| {
        let mut block = room(bytes, path)?;
        block.resize(bytes as usize, 0);
        input.take(&mut block).map_err(|error| cut(path, error))?;
        Ok::<_, Error>(block)
    };
    let mut variants = Vec::new();
    for (at, bytes) in manifest.piece_bytes.iter().copied().enumerate() {
        let block = take(bytes)?;
        let said = manifest
            .variants
            .iter()
            .find(|(other, _)| *other as usize == at);
        let named = links[at].variant(blake3::hash(&block).as_bytes());
        if said.is_some_and(|(_, key)| *key != named.0) {
            return Err(wrong("the key of a piece does not match its tokens"));
        }
        let key = match said {
            // It stays one that nobody else's can take the place of.
            Some(_) => Some(sessions.put_variant(links[at], block)?),
            None => sessions.put_piece(links[at], block)?,
        };
        if let Some(key) = key {
            variants.push((at as u32, key.0));
        }
    }
    manifest.variants = variants;
    for object in &manifest.objects {
        let block = take(object.bytes)?;
        if *blake3::hash(&block).as_bytes() != object.sum {
            return Err(wrong("an object fails checksum verification"));
        }
        put_object(sessions, end, object, block)?;
    }
    // What was read is what was looked at.
    let mut said = [0; SUM];
    let read = input.inner.read_exact(&mut said);
    read.map_err(|error| cut(path, error))?;
    if *input.hasher.finalize().as_bytes() != said {
        return Err(wrong("it changed while it was being read"));
    }
    finish(sessions, end, &manifest, &before)
}

/// Whether a file ends with the sum of what is before.
fn is_whole(file: &mut impl Read, len: u64) -> std::io::Result<bool> {
    let Some(body) = len.checked_sub(SUM as u64) else {
        return Ok(false);
    };
    let mut hasher = blake3::Hasher::new();
    let mut reader = BufReader::with_capacity(1 << 20, file);
    let mut chunk = vec![0; 1 << 20];
    let mut left = body;
    while left > 0 {
        let some = &mut chunk[..left.min(1 << 20) as usize];
        reader.read_exact(some)?;
        hasher.update(some);
        left -= some.len() as u64;
    }
    let mut said = [0; SUM];
    reader.read_exact(&mut said)?;
    Ok(*hasher.finalize().as_bytes() == said)
}

/// A state of other weights, or another layout, is of no use.
fn refuse_others(sessions: &Sessions, about: &About) -> Result<(), Error> {
    let same = about.namespace() == sessions.pieces.id()
        && about.space == sessions.space
        && about.piece_tokens == sessions.piece_tokens;
    match same {
        true => Ok(()),
        false => Err(Error::input(
            "session",
            format!("a session of namespace {}", about.namespace()),
            format!(
                "sessions of namespace {} (same model, weights, layout and piece size)",
                sessions.pieces.id()
            ),
        )),
    }
}
