//! Files of the tier `Posix`, each judged alone: what `kvdepot verify` sees of a directory of
//! blocks, or of a file that was found anywhere.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvdepot_media::checksum::{LEAF, compose, digest, leaves};
use kvdepot_media::{Mac, MacKey};

use crate::error::Error;
use crate::format::GRANULE;
use crate::format::file_header::{self, FileHeader, LEN, MAGIC};
use crate::key::NamespaceId;
use crate::parts::{self, Part};

/// The result of checking a block file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Judged {
    /// Header of the file, or `None` if it is not valid.
    pub header: Option<FileHeader>,
    /// Reason for which the file is not a valid block; `None` if it is.
    pub fault: Option<String>,
    /// Corrupt leaves, if the header has their digests: offset in the payload and length, in bytes.
    pub rotten: Vec<(u64, u64)>,
}

/// A function that returns the keys that may have authenticated the blocks of a namespace.
pub type Keys<'a> = &'a (dyn Fn(NamespaceId) -> Vec<Arc<MacKey>> + Sync);

/// Returns true if the file at `path` starts with the magic bytes of a block file.
#[must_use]
pub fn is_block_file(path: &Path) -> bool {
    let mut begins = [0; MAGIC.len()];
    let is_file = fs::metadata(path).is_ok_and(|about| about.is_file());
    let read = is_file.then(|| File::open(path).and_then(|mut file| file.read_exact(&mut begins)));
    matches!(read, Some(Ok(()))) && begins == MAGIC
}

/// Returns the files with block names in a directory of the tier `Posix`, sorted by name.
///
/// Returns `None` if `directory` is not such a directory.
///
/// # Errors
///
/// [`Error::Io`] if the directory cannot be read.
pub fn block_files(directory: &Path) -> Result<Option<Vec<PathBuf>>, Error> {
    let blocks = directory.join("blocks");
    if !directory.join("settings").is_file() || !blocks.is_dir() {
        return Ok(None);
    }
    let mut files = Vec::new();
    for folder in entries(&blocks)? {
        match entries(&folder) {
            Ok(found) => files.extend(found),
            // What somebody has put there, or taken away meanwhile, holds no blocks.
            Err(Error::Io { source, .. })
                if matches!(
                    source.kind(),
                    ErrorKind::NotADirectory | ErrorKind::NotFound
                ) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Some(files))
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let read = fs::read_dir(folder).and_then(|all| {
        let paths = all.map(|entry| entry.map(|entry| entry.path()));
        paths.collect::<io::Result<Vec<PathBuf>>>()
    });
    let mut paths = read.map_err(|source| Error::Io {
        path: folder.into(),
        source,
    })?;
    paths.sort_unstable();
    Ok(paths)
}

/// Reads and checks a whole block file, in the calling thread.
///
/// Set `named` for a file in a directory of `Posix`, whose name must match its identity. With
/// `keys`, one of them must authenticate the file. Returns `None` if the file does not exist, or no
/// longer exists.
#[must_use]
pub fn judge_file(path: &Path, named: bool, keys: Option<Keys<'_>>) -> Option<Judged> {
    let judged = match fs::metadata(path) {
        Ok(about) if about.is_file() => File::open(path).and_then(|file| judge(&file, keys)),
        Ok(_) => Ok(refused("it is not a regular file")),
        Err(error) => Err(error),
    };
    let mut judged = match judged {
        Ok(judged) => judged,
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        Err(error) => refused(format!("it cannot be read: {error}")),
    };
    let name = judged.header.filter(|_| named).map(|header| {
        let (key, namespace) = (header.identity.key, header.identity.namespace);
        format!("{key}-{namespace}")
    });
    if name.is_some_and(|name| path.file_name() != Some(name.as_ref())) {
        judged.fault = Some("its header identifies a different block than its file name".into());
    }
    Some(judged)
}

fn refused(why: impl Into<String>) -> Judged {
    Judged {
        header: None,
        fault: Some(why.into()),
        rotten: Vec::new(),
    }
}

fn judge(file: &File, keys: Option<Keys<'_>>) -> io::Result<Judged> {
    let len = file.metadata()?.len();
    let mut page = [0; LEN];
    if len < LEN as u64 {
        return Ok(refused(format!(
            "it has {len} bytes, which is less than a header"
        )));
    }
    file.read_exact_at(&mut page, 0)?;
    let Some(header) = FileHeader::decode(&page) else {
        return Ok(match FileHeader::is_newer(&page) {
            true => refused("its header was written by a later release"),
            false => refused("its header is damaged"),
        });
    };
    let (mut fault, rotten) = match fault_of(file, len, &page, &header)? {
        Ok(rotten) => (named_first(&rotten), rotten),
        Err(fault) => (Some(fault), Vec::new()),
    };
    if let (None, Some(keys)) = (&fault, keys) {
        let keys = keys(header.identity.namespace);
        fault = forged(file, &header, &file_header::macs(&page), keys)?;
    }
    Ok(Judged {
        header: Some(header),
        fault,
        rotten,
    })
}

fn named_first(rotten: &[(u64, u64)]) -> Option<String> {
    let ((at, len), others) = (rotten.first()?, rotten.len() - 1);
    let last = at + len - 1;
    let more = match others {
        0 => String::new(),
        _ => format!("; {others} other leaves do not match either"),
    };
    Some(format!(
        "the leaf at bytes {at} to {last} of the payload does not match its digest{more}"
    ))
}

/// The leaves that are not what was written, or what else is wrong.
fn fault_of(
    file: &File,
    len: u64,
    page: &[u8; LEN],
    header: &FileHeader,
) -> io::Result<Result<Vec<(u64, u64)>, String>> {
    let room = (LEN as u64 + header.len).next_multiple_of(GRANULE);
    if len != room {
        return Ok(Err(format!(
            "it has {len} bytes, but its header requires {room}"
        )));
    }
    let recorded = match file_header::leaves(page) {
        Ok(recorded) => recorded,
        Err(count) => {
            let most = file_header::SUMS_MAX;
            let why = format!("its header records {count} leaves, but holds at most {most}");
            return Ok(Err(why));
        }
    };
    let Some(found) = parts_of(file, header)? else {
        return Ok(Err("the part table does not match its checksum".into()));
    };
    let count: u64 = found.iter().map(|part| leaves(part.len)).sum();
    if !recorded.is_empty() && recorded.len() as u64 != count {
        let wrong = recorded.len();
        return Ok(Err(format!(
            "its header records {wrong} leaves, but the payload has {count}"
        )));
    }
    let (mut rotten, mut rest) = (Vec::new(), recorded.as_slice());
    let mut leaf = Vec::new();
    for (number, part) in found.iter().enumerate() {
        let id = parts::part_id(&header.identity, number as u32, header.parts);
        let sum = |digests: &[u128]| compose(&id, part.len, digests.iter().copied());
        let mut digests = Vec::new();
        for at in (0..part.len).step_by(LEAF as usize) {
            leaf.resize((part.len - at).min(LEAF) as usize, 0);
            file.read_exact_at(&mut leaf, LEN as u64 + part.offset + at)?;
            digests.push(digest(&leaf));
        }
        let expected = rest.split_off(..digests.len()).unwrap_or_default();
        if !expected.is_empty() && sum(expected) != part.checksum {
            let why = "the leaf digests in its header do not match the payload's checksum";
            return Ok(Err(why.into()));
        }
        if expected.is_empty() && sum(&digests) != part.checksum {
            return Ok(Err(match header.parts {
                1 => "the payload does not match its checksum".into(),
                _ => format!("part {number} does not match its checksum"),
            }));
        }
        let differ = (0..).zip(digests.iter().zip(expected));
        let differ = differ.filter(|(_, (is, expected))| is != expected);
        rotten.extend(differ.map(|(leaf, _)| {
            let at = leaf * LEAF;
            (part.offset + at, (part.len - at).min(LEAF))
        }));
    }
    Ok(Ok(rotten))
}

/// Why none of these keys has authenticated a payload whose other checksum is right.
fn forged(
    file: &File,
    header: &FileHeader,
    macs: &[Mac],
    mut keys: Vec<Arc<MacKey>>,
) -> io::Result<Option<String>> {
    if macs.is_empty() {
        return Ok(Some("it has no MAC".into()));
    }
    let mut leaf = Vec::new();
    let found = parts_of(file, header)?.unwrap_or_default();
    for ((number, part), mac) in (0..).zip(&found).zip(macs) {
        let id = parts::part_id(&header.identity, number, header.parts);
        let mut sums = vec![Vec::new(); keys.len()];
        for at in (0..part.len).step_by(LEAF as usize) {
            leaf.resize((part.len - at).min(LEAF) as usize, 0);
            file.read_exact_at(&mut leaf, LEN as u64 + part.offset + at)?;
            let each = keys.iter().zip(&mut sums);
            each.for_each(|(key, sums)| sums.push(key.leaf(&leaf)));
        }
        let mut sums = sums.into_iter();
        keys.retain(|key| {
            let sums = sums.next().unwrap_or_default();
            key.compose(&id, part.len, sums) == *mac
        });
    }
    let all = found.len() == macs.len() && !keys.is_empty();
    Ok((!all).then(|| "its MAC matches none of the given keys".into()))
}

/// The parts of a payload; `None` where their table does not verify.
fn parts_of(file: &File, header: &FileHeader) -> io::Result<Option<Vec<Part>>> {
    if header.parts == 1 {
        return Ok(Some(vec![Part {
            offset: 0,
            len: header.len,
            checksum: header.checksum,
        }]));
    }
    let mut table = vec![0; usize::from(header.parts) * parts::ENTRY as usize];
    let Some(begin) = header.len.checked_sub(table.len() as u64) else {
        return Ok(None);
    };
    file.read_exact_at(&mut table, LEN as u64 + begin)?;
    let (identity, sum) = (&header.identity, header.checksum);
    Ok(parts::of_table(identity, &table, begin, sum))
}
