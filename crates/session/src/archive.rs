//! One session as one file, to be copied, mailed and kept.
//!
//! The file: the eight bytes `kvsessar`, u32 version, u32 zero, u64 bytes of the manifest, the
//! manifest; then each piece and each object, in its order, without anything between; and last the
//! BLAKE3 of all before it. Little-endian. It is written once, to a temporary name, and renamed.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use kvdepot_store::{BlockBuffers, Buffer, Key, Namespace};

use crate::error::Error;
use crate::index::Id;
use crate::manifest::Manifest;
use crate::store::{MANIFEST_MAX, Sessions, read_all};

const MAGIC: &[u8; 8] = b"kvsessar";
const VERSION: u32 = 1;
const HEAD: usize = 24;
const SUM: usize = 32;

/// What an import has brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Imported {
    /// The session's name here.
    pub id: Id,
    /// Its tokens.
    pub tokens: usize,
    /// Bytes of pieces and objects that were read.
    pub bytes: u64,
}

pub(crate) fn io(path: &Path) -> impl Fn(std::io::Error) -> Error + '_ {
    move |source| Error::Io {
        path: path.display().to_string(),
        source,
    }
}

/// What is written, and its sum.
struct Summed<W> {
    inner: W,
    hasher: blake3::Hasher,
}

impl<W: Write> Summed<W> {
    fn put(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.hasher.update(bytes);
        self.inner.write_all(bytes)
    }
}

impl<R: Read> Summed<R> {
    fn take(&mut self, bytes: &mut [u8]) -> std::io::Result<()> {
        self.inner.read_exact(bytes)?;
        self.hasher.update(bytes);
        Ok(())
    }
}

/// A temporary file, which is gone unless it was renamed.
struct Temporary {
    path: PathBuf,
    kept: bool,
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.kept {
            let _or_gone = std::fs::remove_file(&self.path);
        }
    }
}

/// Has `write` write a file under a temporary name, which becomes `to` once all is on the medium.
/// Nothing is left where that fails.
pub(crate) fn replace(
    to: &Path,
    write: impl FnOnce(&mut File, &Path) -> Result<u64, Error>,
) -> Result<u64, Error> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    if std::fs::metadata(to).is_ok_and(|there| !there.is_file()) {
        let allowed = "a new name, or that of a file to be replaced";
        return Err(Error::input("file", to.display(), allowed));
    }
    // Of no other thread or process, nor of one that had this number before.
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default().as_nanos();
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut name = to.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}-{now:x}-{next}.tmp", std::process::id()));
    let mut temporary = Temporary {
        path: to.with_file_name(name),
        kept: false,
    };
    let at = temporary.path.clone();
    let mut file = File::create_new(&at).map_err(io(&at))?;
    let written = write(&mut file, &at)?;
    file.sync_all().map_err(io(&at))?;
    std::fs::rename(&at, to).map_err(io(to))?;
    temporary.kept = true;
    Ok(written)
}

/// Writes a session to a file; its bytes. Nothing is left where that fails.
///
/// # Errors
/// [`Error::Unknown`], [`Error::Malformed`] where a part of the session is not there, and those of
/// the file.
pub fn export(sessions: &Sessions, id: Id, to: &Path) -> Result<u64, Error> {
    let manifest = sessions.manifest(id)?;
    replace(to, |file, at| {
        let mut out = Summed {
            inner: BufWriter::with_capacity(1 << 20, file),
            hasher: blake3::Hasher::new(),
        };
        let encoded = manifest.encode()?;
        let mut head = MAGIC.to_vec();
        head.extend_from_slice(&VERSION.to_le_bytes());
        head.extend_from_slice(&0_u32.to_le_bytes());
        head.extend_from_slice(&(encoded.len() as u64).to_le_bytes());
        out.put(&head).map_err(io(at))?;
        out.put(&encoded).map_err(io(at))?;
        let mut written = (HEAD + encoded.len() + SUM) as u64;
        let pieces = manifest.keys().into_iter();
        let pieces = pieces.zip(manifest.piece_bytes.iter().copied());
        let objects = manifest.object_keys().into_iter();
        let objects = objects.zip(manifest.objects.iter().map(|one| one.bytes));
        let all = pieces.map(|block| (&sessions.pieces, block));
        for (space, block) in all.chain(objects.map(|block| (&sessions.objects, block))) {
            let bytes = one(sessions, space, block, id)?;
            out.put(&bytes).map_err(io(at))?;
            written += bytes.len() as u64;
        }
        let sum = *out.hasher.finalize().as_bytes();
        out.inner.write_all(&sum).map_err(io(at))?;
        out.inner.flush().map_err(io(at))?;
        Ok(written)
    })
}

fn one(sessions: &Sessions, from: &Namespace, block: (Key, u64), id: Id) -> Result<Vec<u8>, Error> {
    let read = read_all(from, &[block], sessions.timeout)?;
    let bytes = read.into_iter().next().flatten();
    bytes.ok_or_else(|| {
        sessions.index.write().gone(id);
        Error::malformed(
            format!("session {id}"),
            "a part of it is not there, or does not verify",
        )
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
            return Err(wrong("it is no session"));
        }
        if u32_at(8) != VERSION {
            return Err(wrong(&format!(
                "it is of version {}, this release reads {VERSION}",
                u32_at(8)
            )));
        }
        file.rewind().map_err(io(path))?;
        if !is_whole(&mut file, len).map_err(|error| cut(path, error))? {
            return Err(wrong("its bytes have changed, or it is cut"));
        }
        file.seek(SeekFrom::Start(HEAD as u64)).map_err(io(path))?;
        let encoded = u64::from_le_bytes(head[16..].try_into().unwrap_or_default());
        if encoded > MANIFEST_MAX.min(len) {
            return Err(wrong("its manifest is longer than it may be"));
        }
        let mut input = Summed {
            inner: BufReader::with_capacity(1 << 20, file),
            hasher: blake3::Hasher::new(),
        };
        input.hasher.update(&head);
        let mut bytes = vec![0; encoded as usize];
        input.take(&mut bytes).map_err(|error| cut(path, error))?;
        let manifest = Manifest::decode(&bytes)?;
        if manifest.bytes() + encoded + (HEAD + SUM) as u64 != len {
            return Err(wrong("its length is not that of its parts"));
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
            Error::malformed(path.display().to_string(), "it is cut")
        }
        _ => io(path)(error),
    }
}

/// What a file has, without saving it.
///
/// # Errors
/// [`Error::Malformed`] for what is none, is cut or has changed.
pub fn look(from: &Path) -> Result<Manifest, Error> {
    Ok(Archive::open(from)?.manifest)
}

/// Reads a session from a file, and saves it, to the bit.
///
/// # Errors
/// [`Error::Malformed`] for what is none, is cut or has changed; [`Error::Input`] for one that
/// these sessions cannot use; [`Error::NotStored`].
pub fn import(sessions: &Sessions, from: &Path) -> Result<Imported, Error> {
    let Archive {
        path,
        mut input,
        mut manifest,
    } = Archive::open(from)?;
    let wrong = |reason: &str| Error::malformed(path.display().to_string(), reason);
    refuse_others(sessions, &manifest)?;
    let before = sessions.index.read().same(&manifest.tokens);
    let links = manifest.links();
    let end = links.last().copied().ok_or_else(|| wrong("no tokens"))?;
    let mut take = |bytes: u64| {
        let mut block = vec![0; bytes as usize];
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
            return Err(wrong("a piece has another key than it says"));
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
    for (key, object) in manifest.object_keys().into_iter().zip(&manifest.objects) {
        let block = take(object.bytes)?;
        if *blake3::hash(&block).as_bytes() != object.sum {
            return Err(wrong("an object has other bytes than it says"));
        }
        let buffers = BlockBuffers::whole([Buffer::from_vec(block)]);
        sessions.put("an object", &sessions.objects, vec![key], buffers)?;
    }
    // What was read is what was looked at.
    let mut said = [0; SUM];
    let read = input.inner.read_exact(&mut said);
    read.map_err(|error| cut(path, error))?;
    if *input.hasher.finalize().as_bytes() != said {
        return Err(wrong("it has changed while it was read"));
    }
    let (id, _) = sessions.put_manifest(end, &manifest, &before)?;
    Ok(Imported {
        id,
        tokens: manifest.tokens.len(),
        bytes: manifest.bytes(),
    })
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
fn refuse_others(sessions: &Sessions, manifest: &Manifest) -> Result<(), Error> {
    let same = manifest.pieces_in() == sessions.pieces.id()
        && manifest.objects_in() == sessions.objects.id()
        && manifest.space == sessions.space
        && manifest.piece_tokens == sessions.piece_tokens;
    match same {
        true => Ok(()),
        false => Err(Error::input(
            "session",
            format!("one of namespace {}", manifest.pieces_in()),
            format!(
                "those of {}: same model, weights, layout and piece",
                sessions.pieces.id()
            ),
        )),
    }
}
