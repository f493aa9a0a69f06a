//! An object that has a block, of one version: what it is and how it is read.
//!
//! The version is its ETag. Every request for its bytes names it, and the answer must too: so the
//! length, the parts and the checksum are those of the bytes that come, or none come.

use std::sync::Arc;

use futures_util::future::FutureExt;
use futures_util::stream::StreamExt;
use kvdepot_arena::Identity;
use kvdepot_arena::format::file_header::{FileHeader, LEN, macs};
use kvdepot_arena::format::file_note::FileNote;
use kvdepot_media::{Alignment, Carrier, Failure, Mac, Receipt};
use object_store::path::Path;
use object_store::{Attribute, GetOptions, GetRange, GetResult, ObjectStore};
use tokio::runtime::Handle;

use super::bucket::{Bucket, Fault, Way};
use crate::tier::filter::Filter;

/// The attribute that repeats of the header what is needed to read the payload.
pub(super) const NOTE: &str = "kvdepot";

/// Most bytes of one request: others read the rest meanwhile.
const REQUEST_MAX: u64 = 8 << 20;

/// What is known of a block's object.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub(super) note: FileNote,
    pub(super) e_tag: Arc<str>,
    /// The MACs of its parts.
    pub(super) macs: Arc<[Mac]>,
}

/// What is at a block's name.
#[derive(Clone, Debug)]
pub(super) enum Seen {
    Nothing,
    Block(Found),
    /// Another one's object, or one of a later release, with its ETag.
    Strange {
        e_tag: Arc<str>,
        newer: bool,
    },
}

/// An object that is pinned.
pub(super) struct Object {
    pub(super) bucket: Arc<Bucket>,
    pub(super) runtime: Handle,
    pub(super) filter: Arc<Filter<Found>>,
    pub(super) name: Identity,
    pub(super) path: Path,
    pub(super) found: Found,
    /// The table of a block of several parts.
    pub(super) table: Vec<u8>,
}

/// Looks at an object without reading it, if it says what it is. One without MACs is strange if it
/// shall be `proven`.
pub(super) async fn look(
    bucket: &Bucket,
    way: Way,
    path: &Path,
    (name, proven): (&Identity, bool),
) -> Result<Seen, Fault> {
    let head = || GetOptions::new().with_head(true);
    let asked = bucket.ask_for(way, || bucket.store().get_opts(path, head()).boxed());
    let Some(result) = asked.await? else {
        return Ok(Seen::Nothing);
    };
    let size = result.meta.size;
    let Some(e_tag) = result.meta.e_tag.as_deref().map(Arc::from) else {
        bucket.count(Fault::Unknown);
        return Err(Fault::Unknown);
    };
    let note = result.attributes.get(&Attribute::Metadata(NOTE.into()));
    let note = note.and_then(|note| note_of(note, name));
    let note = note.filter(|note| size == LEN as u64 + note.len);
    if let Some(note) = note.filter(|note| !proven || note.mac.is_some()) {
        let macs = note.mac.into_iter().collect();
        return Ok(Seen::Block(Found { note, e_tag, macs }));
    }
    look_inside(bucket, way, (path, e_tag, size), (name, proven)).await
}

/// The same for one that does not say: somebody has copied it here by other means.
async fn look_inside(
    bucket: &Bucket,
    way: Way,
    (path, e_tag, size): (&Path, Arc<str>, u64),
    (name, proven): (&Identity, bool),
) -> Result<Seen, Fault> {
    let strange = |newer| Seen::Strange {
        e_tag: Arc::clone(&e_tag),
        newer,
    };
    if size < LEN as u64 {
        return Ok(strange(false));
    }
    let mut page = [0; LEN];
    let whole = (path, &*e_tag);
    read(bucket, way, whole, 0, LEN as u64, |at, bytes| {
        page[at as usize..][..bytes.len()].copy_from_slice(bytes);
        true
    })
    .await?;
    let header = FileHeader::decode(&page);
    let header =
        header.filter(|header| header.identity == *name && size == LEN as u64 + header.len);
    let macs: Arc<[Mac]> = macs(&page).into();
    Ok(match header.filter(|_| !proven || !macs.is_empty()) {
        Some(header) => Seen::Block(Found {
            note: FileNote {
                len: header.len,
                parts: header.parts,
                checksum: header.checksum,
                mac: macs.first().copied().filter(|_| header.parts == 1),
            },
            e_tag,
            macs,
        }),
        None => strange(FileHeader::is_newer(&page)),
    })
}

/// Reads `len` bytes from `at` on of one version, and gives them to `take` in order, until that
/// says that nobody wants more. No more and no fewer come.
pub(super) async fn read(
    bucket: &Bucket,
    way: Way,
    (path, e_tag): (&Path, &str),
    at: u64,
    len: u64,
    mut take: impl FnMut(u64, &[u8]) -> bool + Send,
) -> Result<(), Fault> {
    let mut done = 0;
    let mut turn = bucket.turn(way, bucket.deadline()).await?;
    loop {
        let request = async {
            let range = at + done..at + len;
            let options = GetOptions::new()
                .with_range(Some(GetRange::Bounded(range.clone())))
                .with_if_match(Some(e_tag));
            let result = bucket.store().get_opts(path, options).await;
            let result = result.map_err(|error| bucket.note(&error))?;
            if !is_same(&result, e_tag) {
                return Err(Fault::Changed);
            }
            if result.range != range {
                return Err(Fault::Short);
            }
            let mut body = result.into_stream();
            while let Some(bytes) = body.next().await {
                let bytes = bytes.map_err(|error| bucket.note(&error))?;
                if bytes.len() as u64 > len - done {
                    return Err(Fault::Short);
                }
                if !take(done, &bytes) {
                    return Ok(());
                }
                done += bytes.len() as u64;
            }
            match done == len {
                true => Ok(()),
                false => Err(Fault::Short),
            }
        };
        if let Some(answer) = turn.once(request).await {
            return answer;
        }
    }
}

/// Servers that do not know the condition answer all the same.
fn is_same(result: &GetResult, e_tag: &str) -> bool {
    result.meta.e_tag.as_deref() == Some(e_tag)
}

impl Object {
    /// What has receipts that follow one another comes by one request.
    async fn fetch(self: Arc<Object>, mut receipts: Vec<Receipt>) {
        let Some(first) = receipts.first() else {
            return;
        };
        let at = LEN as u64 + first.at();
        let len = receipts.iter().map(|one| one.len() as u64).sum();
        // Where each begins.
        let mut begins = Vec::with_capacity(receipts.len());
        let mut next = 0;
        for one in &receipts {
            begins.push(next);
            next += one.len() as u64;
        }
        let mut current = 0;
        let whole = (&self.path, &*self.found.e_tag);
        let fetched = read(
            &self.bucket,
            Way::Read,
            whole,
            at,
            len,
            |mut at, mut bytes| {
                while !bytes.is_empty() {
                    let receipt = &mut receipts[current];
                    if receipt.is_cancelled() {
                        return false;
                    }
                    let begin = (at - begins[current]) as usize;
                    let fits = bytes.len().min(receipt.len() - begin);
                    receipt.fill(begin, &bytes[..fits]);
                    at += fits as u64;
                    bytes = &bytes[fits..];
                    if begin + fits == receipt.len() {
                        current += 1;
                    }
                }
                true
            },
        );
        match fetched.await {
            Ok(()) => receipts.into_iter().for_each(|one| {
                if !one.is_cancelled() {
                    let len = one.len();
                    one.carried(len);
                }
            }),
            Err(fault) => {
                if matches!(fault, Fault::Gone | Fault::Changed) {
                    self.filter.forget(&self.name);
                }
                let failure = match fault {
                    Fault::Short => Failure::Short {
                        carried: 0,
                        asked: len,
                    },
                    _ => Failure::Unanswered,
                };
                receipts.into_iter().for_each(|one| one.failed(failure));
            }
        }
    }
}

impl Carrier for Object {
    fn alignment(&self) -> Alignment {
        Alignment::NONE
    }

    fn carry(self: Arc<Self>, receipts: Vec<Receipt>) {
        let mut group: Vec<Receipt> = Vec::new();
        let mut len = 0;
        let go = |group: &mut Vec<Receipt>| {
            let group = std::mem::take(group);
            let _detached = self.runtime.spawn(Arc::clone(&self).fetch(group));
        };
        for receipt in receipts {
            let bytes = receipt.len() as u64;
            let follows = group
                .last()
                .is_some_and(|last| last.at() + last.len() as u64 == receipt.at());
            if !group.is_empty() && (!follows || len + bytes > REQUEST_MAX) {
                go(&mut group);
                len = 0;
            }
            len += bytes;
            group.push(receipt);
        }
        if !group.is_empty() {
            go(&mut group);
        }
    }

    fn hands(&self) -> usize {
        Arc::as_ptr(&self.bucket).addr()
    }

    fn is_slow(&self) -> bool {
        true
    }

    fn asks_seldom(&self) -> bool {
        true
    }
}

impl std::fmt::Debug for Object {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Object")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

/// As the attribute has it: hexadecimal digits.
pub(super) fn write_note(note: &FileNote, name: &Identity) -> String {
    let bytes = note.encode(name);
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn note_of(text: &str, name: &Identity) -> Option<FileNote> {
    FileNote::decode(&crate::tier::posix::name::bytes_of(text)?, name)
}
