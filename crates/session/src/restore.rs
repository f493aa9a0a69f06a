//! Finding the longest usable beginning, and bringing it back.

use std::ops::Range;

use kvdepot_store::{BlockBuffers, Key, Namespace, Outcome, Task};

use crate::chain::Link;
use crate::error::Error;
use crate::index::{Hit, Hits, Id, Index};
use crate::manifest::{Manifest, Named};
use crate::store::Sessions;

/// How often a lookup begins anew that sessions are replaced under.
const TRIES: usize = 16;

/// Why a session is suspect.
const ROTTEN: &str = "a part fails checksum verification";

/// Session whose manifest was read, for example by [`Sessions::lookup`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Found {
    /// ID of the session.
    pub id: Id,
    /// Tokens of the session. After a lookup by text, trust these tokens, and tokenize only the
    /// text after the first `text_bytes` bytes.
    pub tokens: Vec<u32>,
    /// Length of the rendered text of the tokens, in bytes; 0 if it is unknown.
    pub text_bytes: usize,
    /// Range of tokens and size in bytes of each piece.
    pub pieces: Vec<(Range<usize>, u64)>,
    /// Objects: parts that do not grow with the tokens.
    pub objects: Vec<Named>,
    /// Size of the engine's context when the session was saved, in tokens.
    pub context_tokens: u32,
    pub(crate) manifest: Manifest,
    /// The chain of its tokens, a link a piece.
    links: Vec<Link>,
}

/// Result of a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Restored {
    /// Number of leading tokens whose rows were restored; all tokens if `whole` is true.
    pub cached_tokens: usize,
    /// True if all pieces and objects were restored and verified.
    pub whole: bool,
}

impl Sessions {
    /// Finds complete sessions that are a prefix of `tokens`, and returns at most `most` of them,
    /// longest first.
    ///
    /// # Errors
    /// [`Error::Depot`] if the depot fails.
    pub fn lookup(&self, tokens: &[u32], most: usize) -> Result<Vec<Found>, Error> {
        let begins = |manifest: &Manifest| tokens.starts_with(&manifest.tokens);
        let find = |index: &Index| index.by_tokens(tokens);
        self.usable(find, Hits::links, most, begins)
    }

    /// Finds complete sessions whose rendered text is a prefix of `text`, and returns at most
    /// `most` of them, longest first.
    ///
    /// # Errors
    /// [`Error::Depot`] if the depot fails.
    pub fn lookup_text(&self, text: &[u8], most: usize) -> Result<Vec<Found>, Error> {
        let begins = |manifest: &Manifest| text.starts_with(&manifest.text);
        // What is hashed of a text says nothing of its tokens.
        let links = |_: &Hits, _: &Hit| Vec::new();
        self.usable(|index| index.by_text(text), links, most, begins)
    }

    /// Returns the number of leading tokens whose pieces are stored in the depot, regardless of the
    /// session that they belong to.
    ///
    /// The number covers whole pieces. It is useful for engines whose state has no objects.
    ///
    /// # Errors
    /// [`Error::Depot`] if the depot fails.
    pub fn prefix(&self, tokens: &[u32]) -> Result<usize, Error> {
        let cut = crate::chain::Cut::of_tokens(self.piece_tokens);
        let links = cut.links(&crate::chain::bytes_of(tokens));
        let keys: Vec<Key> = links.iter().map(|link| link.key()).collect();
        let pieces = self.pieces.prefix(&keys)?;
        Ok((pieces * self.piece_tokens as usize).min(tokens.len()))
    }

    fn usable(
        &self,
        find: impl Fn(&Index) -> Hits,
        links: impl Fn(&Hits, &Hit) -> Vec<Link>,
        most: usize,
        begins: impl Fn(&Manifest) -> bool,
    ) -> Result<Vec<Found>, Error> {
        let mut usable = Vec::new();
        for _ in 0..TRIES {
            let (hits, epoch) = {
                let index = self.index.read();
                (find(&index), index.epoch())
            };
            let mut is_gone = false;
            for hit in &hits.found {
                let id = hit.id;
                if usable.len() >= most {
                    break;
                }
                let manifest = match self.manifest(id) {
                    Ok(manifest) => manifest,
                    Err(Error::Unknown(_)) => {
                        is_gone = true;
                        continue;
                    }
                    Err(Error::Malformed { reason, .. }) => {
                        self.suspect(id, &reason);
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                if !begins(&manifest) {
                    continue;
                }
                let found = Found::with(id, manifest, links(&hits, hit));
                match self.is_there(&found)? {
                    true => usable.push(found),
                    false => self.index.write().gone(id),
                }
            }
            // One that was replaced meanwhile is there as another.
            if !is_gone || !usable.is_empty() || self.index.read().epoch() == epoch {
                break;
            }
        }
        Ok(usable)
    }

    /// Returns the session `id`, which may be incomplete; [`restore`](Sessions::restore) reports
    /// that.
    ///
    /// # Errors
    /// [`Error::Unknown`] if there is no such session, [`Error::Malformed`] if its manifest cannot
    /// be decoded, and [`Error::Depot`] if the depot fails.
    pub fn named(&self, id: Id) -> Result<Found, Error> {
        Ok(Found::new(id, self.manifest(id)?))
    }

    fn is_there(&self, found: &Found) -> Result<bool, Error> {
        let keys = found.manifest.keys_by(&found.links);
        let count = self.pieces.prefix(&keys)?;
        if !all_acknowledged(&self.pieces, &keys[count..])? {
            return Ok(false);
        }
        let keys = found.manifest.object_keys_by(&found.links);
        let count = match keys.is_empty() {
            true => 0,
            false => self.objects.prefix(&keys)?,
        };
        all_acknowledged(&self.objects, &keys[count..])
    }

    /// Reads a session into memory and verifies it.
    ///
    /// `rows` has one block of buffers per piece, and `objects` one per object, in the order of
    /// [`Found::pieces`] and [`Found::objects`] and with their sizes.
    ///
    /// If a part fails checksum verification, the depot drops it. Lookups then skip the session
    /// until it is saved again or [`refresh`](Sessions::refresh) is called. Another session that
    /// [`lookup`](Sessions::lookup) returned may still be complete.
    ///
    /// # Errors
    /// [`Error::Input`] if the buffers do not match the session, before any byte is moved, and
    /// [`Error::Depot`] if the depot fails.
    pub fn restore(
        &self,
        found: &Found,
        rows: BlockBuffers,
        objects: BlockBuffers,
    ) -> Result<Restored, Error> {
        let sizes: Vec<u64> = found.pieces.iter().map(|(_, bytes)| *bytes).collect();
        fit("rows", &rows, &sizes)?;
        let sizes: Vec<u64> = found.objects.iter().map(|one| one.bytes).collect();
        fit("objects", &objects, &sizes)?;
        let manifest = &found.manifest;
        let rows = self.get(&self.pieces, manifest.keys_by(&found.links), rows)?;
        let objects = match found.objects.is_empty() {
            true => Vec::new(),
            false => {
                let keys = manifest.object_keys_by(&found.links);
                self.get(&self.objects, keys, objects)?
            }
        };
        let come = rows.iter().take_while(|one| **one == Outcome::Done).count();
        let whole = come == rows.len() && objects.iter().all(|one| *one == Outcome::Done);
        // What has gone, or is late, is no fault of what is there.
        let mut all = rows.iter().chain(&objects);
        if all.any(|one| *one == Outcome::Corrupt) {
            self.suspect(found.id, ROTTEN);
        }
        if whole {
            self.count_use(found.id);
        }
        let end = found
            .pieces
            .get(come.wrapping_sub(1))
            .map_or(0, |(run, _)| run.end);
        Ok(Restored {
            cached_tokens: end,
            whole,
        })
    }

    /// Reads the object with index `at` in [`Found::objects`] into memory, and returns true if it
    /// was restored and verified.
    ///
    /// Engines use this call to read metadata before they choose the buffers for the rest. If the
    /// object fails checksum verification, the session is excluded from lookups, as by
    /// [`restore`](Sessions::restore).
    ///
    /// # Errors
    /// [`Error::Input`] if there is no such object or `into` has another size, and [`Error::Depot`]
    /// if the depot fails.
    pub fn restore_object(
        &self,
        found: &Found,
        at: usize,
        into: BlockBuffers,
    ) -> Result<bool, Error> {
        let Some(object) = found.objects.get(at) else {
            let allowed = format!("less than {}", found.objects.len());
            return Err(Error::input("object", at, allowed));
        };
        fit("object", &into, &[object.bytes])?;
        let keys = found.manifest.object_keys().into_iter().skip(at).take(1);
        let outcomes = self.get(&self.objects, keys.collect(), into)?;
        if outcomes.contains(&Outcome::Corrupt) {
            self.suspect(found.id, ROTTEN);
        }
        Ok(outcomes == [Outcome::Done])
    }

    fn suspect(&self, id: Id, reason: &str) {
        tracing::warn!(session = %id, reason, "session is damaged; excluded from lookups");
        self.index.write().quarantine(id);
    }

    fn get(
        &self,
        from: &Namespace,
        keys: Vec<Key>,
        buffers: BlockBuffers,
    ) -> Result<Vec<Outcome>, Error> {
        let bytes = (0..buffers.len()).map(|at| buffers.bytes(at)).sum();
        let task: Task = from.get(keys, buffers)?;
        let waited = crate::store::wait(&task, self.timeout, bytes);
        if waited.is_err() {
            // Nothing may come into the caller's memory behind its back.
            task.wait_released(None)?;
        }
        waited?;
        Ok(task.outcomes())
    }
}

/// Whether all that a lookup has missed is there all the same: a tier believes for a moment what it
/// has missed, and others may have saved it since.
fn all_acknowledged(space: &Namespace, missed: &[Key]) -> Result<bool, Error> {
    Ok(missed.is_empty() || space.acknowledged(missed)?.iter().all(Option::is_some))
}

/// Refuses buffers that are not as a session has its parts.
pub(crate) fn fit(what: &str, buffers: &BlockBuffers, wanted: &[u64]) -> Result<(), Error> {
    let lens: Vec<u64> = (0..buffers.len()).map(|at| buffers.bytes(at)).collect();
    if lens == wanted {
        return Ok(());
    }
    // What is no memory may have any length.
    let all = lens.iter().fold(0_u64, |all, len| all.saturating_add(*len));
    let (value, allowed) = (
        format!("{} blocks, {all} bytes", lens.len()),
        format!(
            "{} blocks, {} bytes, the sizes in the session",
            wanted.len(),
            wanted.iter().sum::<u64>()
        ),
    );
    Err(Error::input(what, value, allowed))
}

impl Found {
    /// Returns the rendered text of the tokens; empty if it is unknown.
    #[must_use]
    pub fn text(&self) -> &[u8] {
        &self.manifest.text
    }

    /// Returns the note of the checkpoint.
    #[must_use]
    pub fn note(&self) -> &str {
        &self.manifest.note
    }

    pub(crate) fn new(id: Id, manifest: Manifest) -> Found {
        Found::with(id, manifest, Vec::new())
    }

    /// With the links of its pieces, where they are known: as many as it has.
    fn with(id: Id, manifest: Manifest, mut links: Vec<Link>) -> Found {
        if links.len() != manifest.piece_bytes.len() {
            links = manifest.links();
        }
        let each = manifest.piece_tokens as usize;
        let count = manifest.tokens.len();
        let run = |(at, bytes): (usize, &u64)| (at * each..((at + 1) * each).min(count), *bytes);
        Found {
            id,
            tokens: manifest.tokens.clone(),
            text_bytes: manifest.text.len(),
            pieces: manifest.piece_bytes.iter().enumerate().map(run).collect(),
            objects: manifest.objects.clone(),
            context_tokens: manifest.context_tokens,
            manifest,
            links,
        }
    }
}

impl Manifest {
    /// Keys of its pieces.
    pub(crate) fn keys(&self) -> Vec<Key> {
        self.keys_by(&self.links())
    }

    /// The same, of which the links are known.
    fn keys_by(&self, links: &[Link]) -> Vec<Key> {
        let mut keys: Vec<Key> = links.iter().map(|link| link.key()).collect();
        for (at, key) in &self.variants {
            if let Some(one) = keys.get_mut(*at as usize) {
                *one = Key(*key);
            }
        }
        keys
    }

    /// Keys of its objects.
    pub(crate) fn object_keys(&self) -> Vec<Key> {
        match self.objects.is_empty() {
            true => Vec::new(),
            false => self.object_keys_by(&self.links()),
        }
    }

    fn object_keys_by(&self, links: &[Link]) -> Vec<Key> {
        let end = links.last();
        let each = self.objects.iter();
        each.filter_map(|one| Some(end?.object(&one.name, &one.sum)))
            .collect()
    }
}
