//! Which sessions there are, by what they begin with: no lookup opens one.
//!
//! A session is listed at the last full piece of its tokens, and at that of its text, with what
//! stands behind. A query walks down the links of its own pieces, and compares what is behind each.

use std::collections::{HashMap, HashSet};
use std::fmt;

use kvdepot_store::Key;

use crate::chain::{Cut, Link, bytes_of};
use crate::error::Error;
use crate::manifest::{Manifest, Reason};

/// ID of a session, 16 bytes: the first half of the key of its manifest.
///
/// `Display` formats it as 32 hexadecimal digits.
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
    /// A part of it did not verify: it is found no more until it is saved again, or looked for.
    pub(crate) is_bad: bool,
    /// When it was added last.
    added_at: u64,
    /// When a part of it was not there.
    gone_at: Option<u64>,
    /// Behind which pieces of its tokens, and of its text, it is listed.
    places: (Link, Option<Link>),
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

    /// Where it is listed.
    fn add(&mut self, bytes: &[u8], id: Id) -> Link {
        let (boundary, end) = self.place(bytes, id);
        let ends = self.ends.entry(boundary).or_default();
        ends.retain(|other| other.id != id);
        ends.push(end);
        boundary
    }

    fn remove(&mut self, boundary: &Link, id: Id) {
        if let Some(ends) = self.ends.get_mut(boundary) {
            ends.retain(|other| other.id != id);
            if ends.is_empty() {
                self.ends.remove(boundary);
            }
        }
    }

    /// Sessions that end where these bytes do.
    fn same(&self, bytes: &[u8]) -> Vec<Id> {
        let (boundary, end) = self.place(bytes, Id([0; 16]));
        let ends = self.ends.get(&boundary).into_iter().flatten();
        ends.filter(|other| other.link == end.link)
            .map(|other| other.id)
            .collect()
    }

    /// Sessions that these bytes begin with, the longest first, and the chain of these bytes.
    fn find(&self, bytes: &[u8]) -> Hits {
        let boundaries = self.cut.boundaries(bytes);
        let mut found = Vec::new();
        for (at, boundary) in boundaries.iter().enumerate().rev() {
            let Some(ends) = self.ends.get(boundary) else {
                continue;
            };
            let rest = &bytes[at * self.cut.piece..];
            // Many may end alike far behind their last full piece.
            let mut links: HashMap<usize, Option<Link>> = HashMap::new();
            let mut here: Vec<&End> = Vec::new();
            for end in ends {
                let link = links.entry(end.behind).or_insert_with(|| {
                    let behind = rest.get(..end.behind)?;
                    Some(boundary.then(behind))
                });
                if *link == Some(end.link) {
                    here.push(end);
                }
            }
            // Those that were added last go first.
            here.reverse();
            here.sort_by_key(|end| std::cmp::Reverse(end.behind));
            found.extend(here.into_iter().map(|end| Hit {
                id: end.id,
                full: at,
                last: (end.behind > 0).then_some(end.link),
            }));
        }
        Hits { boundaries, found }
    }
}

/// A session that a prompt begins with, and where in the prompt's chain it ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hit {
    pub(crate) id: Id,
    /// Its full pieces.
    full: usize,
    /// The link of the last one, which is not full.
    last: Option<Link>,
}

/// What a query has found.
#[derive(Debug, Default)]
pub(crate) struct Hits {
    boundaries: Vec<Link>,
    pub(crate) found: Vec<Hit>,
}

impl Hits {
    /// The links of a session's pieces: those of what was asked for, so nothing is hashed again.
    pub(crate) fn links(&self, hit: &Hit) -> Vec<Link> {
        let full = self.boundaries.iter().skip(1).take(hit.full);
        full.copied().chain(hit.last).collect()
    }
}

/// All sessions that are known.
pub(crate) struct Index {
    tokens: Beginnings,
    texts: Beginnings,
    entries: HashMap<Id, Entry>,
    /// Counts what may have brought back what was gone.
    epoch: u64,
}

impl Index {
    pub(crate) fn new(piece_tokens: u32) -> Index {
        Index {
            tokens: Beginnings::new(Cut::of_tokens(piece_tokens)),
            texts: Beginnings::new(Cut::of_text()),
            entries: HashMap::new(),
            epoch: 0,
        }
    }

    pub(crate) fn add(&mut self, key: Key, len: u64, manifest: &Manifest) -> Id {
        let id = Id::of(&key);
        self.epoch += 1;
        let text = &manifest.text;
        let places = (
            self.tokens.add(&bytes_of(&manifest.tokens), id),
            (!text.is_empty()).then(|| self.texts.add(text, id)),
        );
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
                added_at: self.epoch,
                gone_at: None,
                places,
            },
        );
        id
    }

    /// It is there no more.
    pub(crate) fn remove(&mut self, id: Id) {
        if let Some(entry) = self.entries.remove(&id) {
            let (tokens, text) = entry.places;
            self.tokens.remove(&tokens, id);
            if let Some(text) = text {
                self.texts.remove(&text, id);
            }
        }
    }

    /// Those of a listing that was begun at an epoch are there, and of the others what was added
    /// since.
    pub(crate) fn retain(&mut self, there: &HashSet<Id>, epoch: u64) {
        let is_gone = |(id, entry): (&Id, &Entry)| entry.added_at <= epoch && !there.contains(id);
        let gone = self
            .entries
            .iter()
            .filter(|(id, entry)| is_gone((id, entry)));
        let gone: Vec<Id> = gone.map(|(id, _)| *id).collect();
        gone.into_iter().for_each(|id| self.remove(id));
    }

    /// A part of it does not verify.
    pub(crate) fn quarantine(&mut self, id: Id) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.is_bad = true;
        }
    }

    /// A part of it is not there: it is not asked for until something may have changed that.
    pub(crate) fn gone(&mut self, id: Id) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.gone_at = Some(self.epoch);
        }
    }

    /// Others may have saved again what was bad, or gone.
    pub(crate) fn doubt(&mut self) {
        self.epoch += 1;
        self.entries
            .values_mut()
            .for_each(|entry| entry.is_bad = false);
    }

    /// Changes with what there is.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Sessions of just these tokens.
    pub(crate) fn same(&self, tokens: &[u32]) -> Vec<Id> {
        self.tokens.same(&bytes_of(tokens))
    }

    pub(crate) fn entry(&self, id: Id) -> Option<&Entry> {
        self.entries.get(&id)
    }

    /// The session whose name begins with these hexadecimal digits.
    pub(crate) fn named(&self, digits: &str) -> Result<Id, Error> {
        if digits.is_empty() {
            return Err(Error::input(
                "session",
                "an empty ID",
                "a session ID, or a unique prefix of it",
            ));
        }
        let digits = digits.to_ascii_lowercase();
        let all = self.entries.keys().copied();
        let found: Vec<Id> = all
            .filter(|id| id.to_string().starts_with(&digits))
            .collect();
        match found[..] {
            [one] => Ok(one),
            [] => Err(Error::Unknown(digits)),
            _ => Err(Error::input(
                "session",
                digits,
                "a prefix that matches only one session ID",
            )),
        }
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (Id, &Entry)> {
        self.entries.iter().map(|(id, entry)| (*id, entry))
    }

    /// Sessions whose tokens these begin with, the longest first.
    pub(crate) fn by_tokens(&self, tokens: &[u32]) -> Hits {
        self.good(self.tokens.find(&bytes_of(tokens)), |entry| entry.tokens)
    }

    /// The same of rendered text. The links are those of the text.
    pub(crate) fn by_text(&self, text: &[u8]) -> Hits {
        self.good(self.texts.find(text), |entry| entry.text_bytes)
    }

    fn good(&self, mut hits: Hits, len: impl Fn(&Entry) -> usize) -> Hits {
        let is_good = |entry: &&Entry| !entry.is_bad && entry.gone_at != Some(self.epoch);
        let found = hits.found.iter().filter_map(|hit| {
            let entry = self.entries.get(&hit.id).filter(is_good)?;
            Some((std::cmp::Reverse((len(entry), entry.created)), *hit))
        });
        let mut found: Vec<_> = found.collect();
        // Of those of the same tokens the newest: others may have saved them at the same time.
        found.sort_by_key(|(order, _)| *order);
        hits.found = found.into_iter().map(|(_, hit)| hit).collect();
        hits
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::sample;

    #[test]
    fn what_is_saved_while_a_listing_is_made_stays() {
        let mut index = Index::new(4);
        let [one, other] = [Key([1; 32]), Key([2; 32])];
        index.add(one, 1, &sample());
        let listed_at = index.epoch();
        // Removed before it is listed, and saved again before the listing is looked at.
        index.remove(Id::of(&one));
        index.add(one, 1, &sample());
        index.add(other, 1, &sample());
        index.retain(&HashSet::new(), listed_at);
        assert_eq!(index.entries().count(), 2);
        index.retain(&HashSet::from([Id::of(&other)]), index.epoch());
        let left: Vec<Id> = index.entries().map(|(id, _)| id).collect();
        assert_eq!(left, [Id::of(&other)]);
    }
}
