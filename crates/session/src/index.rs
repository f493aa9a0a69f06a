//! Which sessions there are, by what they begin with: no lookup opens one.
//!
//! A session is listed at the last full piece of its tokens, and at that of its text, with what
//! stands behind. A query walks down the links of its own pieces, and compares what is behind each.

use std::collections::HashMap;
use std::fmt;

use kvdepot_store::Key;

use crate::chain::{Cut, Link, bytes_of};
use crate::manifest::{Manifest, Reason};

/// The name of a session: the first half of its manifest's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(pub(crate) [u8; 16]);

impl Id {
    pub(crate) fn of(key: &Key) -> Id {
        let mut id = [0; 16];
        id.copy_from_slice(&key.0[..16]);
        Id(id)
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// What is known of a session without its manifest.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) key: Key,
    /// Bytes of the manifest.
    pub(crate) len: u64,
    pub(crate) tokens: usize,
    pub(crate) text_bytes: usize,
    pub(crate) bytes: u64,
    pub(crate) created: u64,
    pub(crate) reason: Reason,
    pub(crate) note: String,
    /// Its first piece, for those that share some.
    pub(crate) first: Link,
    /// It did not verify, or is not whole: it is found no more.
    pub(crate) is_bad: bool,
}

/// Where a beginning ends: behind a full piece, so many bytes of the next.
#[derive(Clone, Copy, Debug)]
struct End {
    behind: usize,
    link: Link,
    id: Id,
}

/// Beginnings of one kind.
struct Beginnings {
    cut: Cut,
    ends: HashMap<Link, Vec<End>>,
}

impl Beginnings {
    fn new(cut: Cut) -> Beginnings {
        Beginnings {
            cut,
            ends: HashMap::new(),
        }
    }

    /// The last boundary, and where it ends behind that.
    fn place(&self, bytes: &[u8], id: Id) -> (Link, End) {
        let full = bytes.len() - bytes.len() % self.cut.piece;
        let (head, behind) = bytes.split_at(full);
        let last = self.cut.links(head).pop();
        let boundary = last.unwrap_or_else(|| self.cut.start());
        let end = End {
            behind: behind.len(),
            link: boundary.then(behind),
            id,
        };
        (boundary, end)
    }

    fn add(&mut self, bytes: &[u8], id: Id) {
        if bytes.is_empty() {
            return;
        }
        let (boundary, end) = self.place(bytes, id);
        let ends = self.ends.entry(boundary).or_default();
        ends.retain(|other| other.id != id);
        ends.push(end);
    }

    fn remove(&mut self, bytes: &[u8], id: Id) {
        let (boundary, _) = self.place(bytes, id);
        if let Some(ends) = self.ends.get_mut(&boundary) {
            ends.retain(|other| other.id != id);
            if ends.is_empty() {
                self.ends.remove(&boundary);
            }
        }
    }

    /// Sessions that these bytes begin with, the longest first.
    fn find(&self, bytes: &[u8]) -> Vec<Id> {
        let boundaries = self.cut.boundaries(bytes);
        let mut found = Vec::new();
        for (at, boundary) in boundaries.iter().enumerate().rev() {
            let Some(ends) = self.ends.get(boundary) else {
                continue;
            };
            let rest = &bytes[at * self.cut.piece..];
            let begins = |end: &&End| {
                let behind = rest.get(..end.behind);
                behind.is_some_and(|behind| boundary.then(behind) == end.link)
            };
            let mut here: Vec<&End> = ends.iter().filter(begins).collect();
            here.sort_by_key(|end| std::cmp::Reverse(end.behind));
            found.extend(here.into_iter().map(|end| end.id));
        }
        found
    }
}

/// All sessions that are known.
pub(crate) struct Index {
    tokens: Beginnings,
    texts: Beginnings,
    entries: HashMap<Id, Entry>,
}

impl Index {
    pub(crate) fn new(piece_tokens: u32) -> Index {
        Index {
            tokens: Beginnings::new(Cut::of_tokens(piece_tokens)),
            texts: Beginnings::new(Cut::of_text()),
            entries: HashMap::new(),
        }
    }

    pub(crate) fn add(&mut self, key: Key, len: u64, manifest: &Manifest) -> Id {
        let id = Id::of(&key);
        self.tokens.add(&bytes_of(&manifest.tokens), id);
        self.texts.add(&manifest.text, id);
        let first = manifest.links().first().copied();
        self.entries.insert(
            id,
            Entry {
                key,
                len,
                tokens: manifest.tokens.len(),
                text_bytes: manifest.text.len(),
                bytes: manifest.bytes(),
                created: manifest.created,
                reason: manifest.reason,
                note: manifest.note.clone(),
                first: first.unwrap_or_else(|| manifest.cut().start()),
                is_bad: false,
            },
        );
        id
    }

    pub(crate) fn remove(&mut self, id: Id, manifest: &Manifest) {
        self.tokens.remove(&bytes_of(&manifest.tokens), id);
        self.texts.remove(&manifest.text, id);
        self.entries.remove(&id);
    }

    /// It is gone, and nobody knows what it was: it is found no more.
    pub(crate) fn forget(&mut self, id: Id) {
        self.entries.remove(&id);
    }

    /// It is found no more until it is saved again.
    pub(crate) fn quarantine(&mut self, id: Id) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.is_bad = true;
        }
    }

    pub(crate) fn entry(&self, id: Id) -> Option<&Entry> {
        self.entries.get(&id)
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (Id, &Entry)> {
        self.entries.iter().map(|(id, entry)| (*id, entry))
    }

    /// Sessions whose tokens these begin with, the longest first.
    pub(crate) fn by_tokens(&self, tokens: &[u32]) -> Vec<(Id, Entry)> {
        self.good(self.tokens.find(&bytes_of(tokens)))
    }

    /// The same of rendered text.
    pub(crate) fn by_text(&self, text: &[u8]) -> Vec<(Id, Entry)> {
        self.good(self.texts.find(text))
    }

    fn good(&self, found: Vec<Id>) -> Vec<(Id, Entry)> {
        let good = found.into_iter().filter_map(|id| {
            let entry = self.entries.get(&id).filter(|entry| !entry.is_bad)?;
            Some((id, entry.clone()))
        });
        good.collect()
    }
}
