//! Saving: what is not there yet, and then the manifest.

use std::collections::HashSet;
use std::ops::Range;

use kvdepot_store::{BlockBuffers, Buffer, Key, Namespace, Outcome, Pin, Task};

use crate::chain::{Link, bytes_of};
use crate::error::Error;
use crate::index::Id;
use crate::manifest::{Manifest, Named, OBJECTS_MAX, PART_MAX, Reason};
use crate::store::{MANIFEST_MAX, Sessions, check_size, read_all};
use crate::sums::{Sums, sum_of};

/// State to save.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "made from its fields")]
pub struct Checkpoint<'a> {
    /// All tokens of the conversation; at least one.
    pub tokens: &'a [u32],
    /// Rendered text of the tokens, for [`Sessions::lookup_text`]; empty if it is unknown.
    pub text: &'a [u8],
    /// Cause of the checkpoint.
    pub reason: Reason,
    /// Size of the engine's context, in tokens.
    pub context_tokens: u32,
    /// Names and contents of the parts that do not grow with the tokens, 1 byte to 1 GiB each.
    pub objects: Vec<(String, Buffer)>,
    /// Note of the engine or its user.
    pub note: String,
    /// Time of the checkpoint, in Unix seconds.
    pub created: u64,
    /// True to restore exactly the bits that were saved.
    ///
    /// An engine that computes a prompt in different steps may produce other last bits for the same
    /// tokens. With `false`, any of those rows are accepted, and rows that are already stored are
    /// not requested. With `true`, all rows are requested, and stored under a hash of their bytes
    /// too. Only exact sessions share them.
    pub exact: bool,
}

/// Callback that provides rows: it receives runs of tokens, and returns the buffers of one block
/// per run.
pub type Rows<'a> = dyn FnOnce(&[Range<usize>]) -> Result<BlockBuffers, Error> + 'a;

/// Result of a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Saved {
    /// ID of the session.
    pub id: Id,
    /// Number of tokens whose pieces were already stored.
    pub cached_tokens: usize,
    /// Number of tokens whose pieces were written.
    pub cache_write_tokens: usize,
    /// Bytes that were written, including objects and manifest.
    pub bytes_written: u64,
}

/// The pieces of a session: their keys, and their bytes, 0 for one that is not there.
#[derive(Default)]
pub(crate) struct Pieces {
    pub(crate) keys: Vec<Key>,
    pub(crate) bytes: Vec<u64>,
    pub(crate) variants: Vec<(u32, [u8; 32])>,
}

impl Pieces {
    pub(crate) fn missing(&self) -> Vec<usize> {
        (0..self.keys.len())
            .filter(|at| self.bytes[*at] == 0)
            .collect()
    }
}

/// What was stored.
#[derive(Default)]
pub(crate) struct Written {
    pub(crate) pieces: HashSet<usize>,
    pub(crate) objects: Vec<Key>,
    pub(crate) bytes: u64,
    /// What names the objects that are to be stored.
    sums: Sums,
}

/// Pins that end with the save.
pub(crate) struct Held {
    pub(crate) space: Namespace,
    pub(crate) pins: Vec<Pin>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.space.unpin(&self.pins, false);
    }
}

impl Checkpoint<'_> {
    /// [`check`](Checkpoint::check), and refuses those that come back to the bit.
    pub(crate) fn check_any(&self, piece_tokens: u32, why_not: &str) -> Result<(), Error> {
        self.check(piece_tokens)?;
        match self.exact {
            true => Err(Error::input("exact", "true", why_not)),
            false => Ok(()),
        }
    }

    /// The lengths of its parts that are no pieces, but for what a manifest has beside its tokens.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = u64> {
        let objects = self.objects.iter().map(|(_, bytes)| bytes.len());
        let manifest = self.tokens.len() + self.text.len();
        objects.chain([manifest]).map(|bytes| bytes as u64)
    }

    /// Refuses what cannot be, before a byte moves.
    pub(crate) fn check(&self, piece_tokens: u32) -> Result<(), Error> {
        if self.tokens.is_empty() {
            return Err(Error::input("tokens", "none", "at least one token"));
        }
        if self.objects.len() > OBJECTS_MAX {
            let count = format!("{} objects", self.objects.len());
            return Err(Error::input(
                "objects",
                count,
                format!("at most {OBJECTS_MAX} objects"),
            ));
        }
        for (name, bytes) in &self.objects {
            let len = bytes.len() as u64;
            if !(1..=PART_MAX).contains(&len) {
                let field = format!("objects[{name:?}]");
                return Err(Error::input(
                    field,
                    format!("{len} bytes"),
                    "1 byte to 1GiB",
                ));
            }
        }
        let mut names: Vec<&str> = self.objects.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|two| two[0] == two[1]) {
            let name = format!("{:?} twice", twice[0]);
            return Err(Error::input(
                "objects",
                name,
                "objects with different names",
            ));
        }
        // A manifest has numbers of at most five and ten bytes.
        let (tokens, pieces) = (
            self.tokens.len(),
            self.tokens.len() / piece_tokens as usize + 1,
        );
        let names: usize = names.iter().map(|name| name.len() + 64).sum();
        let most = 5 * tokens + 48 * pieces + self.text.len() + self.note.len() + names + 4096;
        if most as u64 > MANIFEST_MAX {
            let value = format!("{tokens} tokens, {} bytes of text", self.text.len());
            return Err(Error::input(
                "tokens",
                value,
                "a session whose manifest has at most 256MiB",
            ));
        }
        Ok(())
    }
}

impl Sessions {
    /// Saves a checkpoint, and replaces a session with the same tokens.
    ///
    /// `rows` is called at most once, with the runs of tokens of the missing pieces in their order.
    /// It may return the engine's own memory, which is read until this call returns. If no piece is
    /// missing, `rows` is not called. If nothing has changed since the last save, nothing is
    /// written.
    ///
    /// # Errors
    /// * [`Error::Input`] if an argument is not allowed, before any byte is moved.
    /// * [`Error::NotStored`] if a part was rejected or evicted; the session does not exist then.
    /// * Errors of `rows`, and [`Error::Depot`] if the depot fails.
    pub fn save(&self, checkpoint: Checkpoint<'_>, rows: Box<Rows<'_>>) -> Result<Saved, Error> {
        checkpoint.check(self.piece_tokens)?;
        let count = checkpoint.tokens.len();
        let before = self.index.read().same(checkpoint.tokens);
        let cut = crate::chain::Cut::of_tokens(self.piece_tokens);
        let links = cut.links(&bytes_of(checkpoint.tokens));
        let Some(end) = links.last().copied() else {
            return Err(Error::input("tokens", "none", "at least one token"));
        };
        let keys: Vec<Key> = links.iter().map(|link| link.key()).collect();
        // All of what is exact is asked for, and has keys of its own.
        let (there, _held) = match checkpoint.exact {
            true => (vec![0; keys.len()], None),
            false => {
                let (there, held) = self.there(&keys)?;
                (there, Some(held))
            }
        };
        let mut pieces = Pieces {
            keys,
            bytes: there,
            variants: Vec::new(),
        };
        let asked = match checkpoint.exact {
            true => (0..links.len()).collect(),
            false => pieces.missing(),
        };
        let each = self.piece_tokens as usize;
        let run = |piece: &usize| piece * each..((piece + 1) * each).min(count);
        // While pieces are written there is time for it.
        let mut written = Written {
            sums: Sums::begin(&checkpoint.objects),
            ..Written::default()
        };
        let mut _exactly = None;
        if !asked.is_empty() {
            let runs: Vec<Range<usize>> = asked.iter().map(run).collect();
            let buffers = rows(&runs)?;
            check_rows(&buffers, asked.len())?;
            let mut lens = pieces.bytes.clone();
            let new = asked.iter().enumerate();
            new.for_each(|(at, piece)| lens[*piece] = buffers.bytes(at));
            check_size(self.size_max(), lens.into_iter().chain(checkpoint.sizes()))?;
            if checkpoint.exact {
                _exactly = Some(self.put_exactly(&mut pieces, &links, &buffers, &mut written)?);
            } else {
                self.put_missing(&mut pieces, &asked, buffers, &mut written)?;
            }
        }
        self.commit(checkpoint, end, pieces, &mut written, &before)
    }

    /// What is left of a save once its pieces are there.
    pub(crate) fn commit(
        &self,
        checkpoint: Checkpoint<'_>,
        end: Link,
        pieces: Pieces,
        written: &mut Written,
        before: &[Id],
    ) -> Result<Saved, Error> {
        step("pieces are stored");
        let (count, each) = (checkpoint.tokens.len(), self.piece_tokens as usize);
        let tokens = |piece: &usize| each.min(count - piece * each);
        let cache_write_tokens = written.pieces.iter().map(tokens).sum();
        let objects = self.put_objects(end, &checkpoint.objects, written)?;
        step("objects are stored");
        let manifest = self.describe(checkpoint, pieces, objects);
        let (id, len) = self.put_manifest(end, &manifest, before)?;
        step("replaced parts are removed");
        Ok(Saved {
            id,
            cached_tokens: count - cache_write_tokens,
            cache_write_tokens,
            bytes_written: written.bytes + len,
        })
    }

    /// Stores pieces that are not there.
    fn put_missing(
        &self,
        pieces: &mut Pieces,
        asked: &[usize],
        buffers: BlockBuffers,
        written: &mut Written,
    ) -> Result<(), Error> {
        for (at, piece) in asked.iter().copied().enumerate() {
            pieces.bytes[piece] = buffers.bytes(at);
            written.bytes += buffers.bytes(at);
            written.pieces.insert(piece);
        }
        let keys = asked.iter().map(|piece| pieces.keys[*piece]).collect();
        self.put("a piece", &self.pieces, keys, buffers)
    }

    /// Stores all pieces, to the bit: under keys that their bytes are a part of. Under a key of the
    /// tokens alone others may store theirs, once these have gone. What is there is held.
    fn put_exactly(
        &self,
        pieces: &mut Pieces,
        links: &[Link],
        buffers: &BlockBuffers,
        written: &mut Written,
    ) -> Result<Held, Error> {
        let each = links.iter().enumerate();
        let keys = each.map(|(piece, link)| Ok(link.variant(&sum_of(buffers.pieces(piece))?)));
        let keys = keys.collect::<Result<Vec<Key>, Error>>()?;
        let (there, held) = self.there(&keys)?;
        let (mut new, mut put) = (Vec::new(), BlockBuffers::default());
        for (piece, (key, there)) in keys.into_iter().zip(there).enumerate() {
            pieces.variants.push((piece as u32, key.0));
            pieces.bytes[piece] = buffers.bytes(piece);
            if there == 0 {
                written.pieces.insert(piece);
                written.bytes += buffers.bytes(piece);
                new.push(key);
                put.push(buffers.pieces(piece).iter().cloned());
            }
        }
        if !new.is_empty() {
            self.put("a piece", &self.pieces, new, put)?;
        }
        Ok(held)
    }

    /// Stores a piece beside others of the same tokens; its key.
    pub(crate) fn put_variant(&self, link: Link, bytes: Vec<u8>) -> Result<Key, Error> {
        let key = link.variant(blake3::hash(&bytes).as_bytes());
        let block = BlockBuffers::whole([Buffer::from_vec(bytes)]);
        self.put("a piece", &self.pieces, vec![key], block)?;
        Ok(key)
    }

    /// Stores a piece to the bit: its key, where there is another of the same tokens.
    pub(crate) fn put_piece(&self, link: Link, bytes: Vec<u8>) -> Result<Option<Key>, Error> {
        let (key, len) = (link.key(), bytes.len() as u64);
        let buffer = Buffer::from_vec(bytes);
        let block = BlockBuffers::whole([buffer.clone()]);
        self.put("a piece", &self.pieces, vec![key], block)?;
        let there = read_all(&self.pieces, &[(key, len)], self.timeout)?
            .pop()
            .flatten();
        let bytes = buffer.to_vec();
        match there.is_some_and(|there| there == bytes) {
            true => Ok(None),
            false => Ok(Some(self.put_variant(link, bytes)?)),
        }
    }

    fn describe(
        &self,
        checkpoint: Checkpoint<'_>,
        pieces: Pieces,
        objects: Vec<Named>,
    ) -> Manifest {
        Manifest {
            pieces_in: self.pieces.id().0,
            objects_in: self.objects.id().0,
            space: self.space.clone(),
            created: checkpoint.created,
            reason: checkpoint.reason,
            context_tokens: checkpoint.context_tokens,
            piece_tokens: self.piece_tokens,
            tokens: checkpoint.tokens.to_vec(),
            text: checkpoint.text.to_vec(),
            piece_bytes: pieces.bytes,
            variants: pieces.variants,
            objects,
            note: checkpoint.note,
        }
    }

    fn put_objects(
        &self,
        end: Link,
        objects: &[(String, Buffer)],
        written: &mut Written,
    ) -> Result<Vec<Named>, Error> {
        if objects.is_empty() {
            return Ok(Vec::new());
        }
        let sums = written.sums.take(objects)?;
        let named = objects.iter().zip(sums).map(|((name, bytes), sum)| Named {
            name: name.clone(),
            bytes: bytes.len() as u64,
            sum,
        });
        let named: Vec<Named> = named.collect();
        let keys: Vec<Key> = named
            .iter()
            .map(|one| end.object(&one.name, &one.sum))
            .collect();
        let there = self.objects.acknowledged(&keys)?;
        let (mut new, mut put) = (Vec::new(), BlockBuffers::default());
        for ((key, there), (_, bytes)) in keys.into_iter().zip(there).zip(objects) {
            if there.is_none() {
                written.bytes += bytes.len() as u64;
                written.objects.push(key);
                new.push(key);
                put.push([bytes.clone()]);
            }
        }
        if !new.is_empty() {
            self.put("an object", &self.objects, new, put)?;
        }
        Ok(named)
    }

    /// Commits a session, whose pieces and objects were stored, in place of those `before` it of
    /// the same tokens; its name, and bytes that were written.
    pub(crate) fn put_manifest(
        &self,
        end: Link,
        manifest: &Manifest,
        before: &[Id],
    ) -> Result<(Id, u64), Error> {
        let mut replaced = Vec::new();
        for id in before {
            match self.manifest(*id) {
                Ok(old) => replaced.push((*id, old)),
                Err(Error::Unknown(_) | Error::Malformed { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        // Of those that say the same, whoever saves keeps the same one. When it was saved first
        // is as true.
        replaced.sort_by_key(|(id, _)| *id);
        let same = replaced.iter().position(|(_, old)| {
            let created = manifest.created;
            *manifest
                == Manifest {
                    created,
                    ..old.clone()
                }
        });
        let (id, written) = match same {
            Some(at) => {
                let (id, old) = replaced.swap_remove(at);
                match self.block_of(id) {
                    Some((key, len)) if self.manifests.acknowledged(&[key])? == [Some(len)] => {
                        let _nothing_goes = self.naming.read();
                        self.check_there(&old)?;
                        self.index.write().add(key, len, &old);
                        (id, 0)
                    }
                    // It was read in a tier that does not outlive the process.
                    _ => self.put_new(end, &old)?,
                }
            }
            None => self.put_new(end, manifest)?,
        };
        for (old, _) in &replaced {
            if let Some((key, _)) = self.block_of(*old) {
                self.manifests.remove(&[key])?;
                self.index.write().remove(*old);
                self.forget_uses(&[*old])?;
            }
        }
        step("replaced manifests are removed");
        self.clear_replaced(manifest, replaced.into_iter().map(|(_, old)| old).collect())?;
        Ok((id, written))
    }

    fn put_new(&self, end: Link, manifest: &Manifest) -> Result<(Id, u64), Error> {
        let bytes = manifest.encode()?;
        let len = bytes.len() as u64;
        let key = end.manifest(blake3::hash(&bytes).as_bytes());
        let buffers = BlockBuffers::whole([Buffer::from_vec(bytes)]);
        let _nothing_goes = self.naming.read();
        self.put("the manifest", &self.manifests, vec![key], buffers)?;
        step("the manifest is stored");
        // What was stored may have made room for what came behind it, or was removed.
        if let Err(error) = self.check_there(manifest) {
            self.manifests.remove(&[key])?;
            return Err(error);
        }
        Ok((self.index.write().add(key, len, manifest), len))
    }

    /// The bytes of each of these pieces where it was acknowledged, and 0 where it was not,
    /// whatever nearer tiers have: there it is gone with the process. What is there stays until the
    /// manifest names it, where a tier can hold it.
    pub(crate) fn there(&self, keys: &[Key]) -> Result<(Vec<u64>, Held), Error> {
        let pins = self.pieces.pin(keys, false)?;
        let held = Held {
            space: self.pieces.clone(),
            pins: pins.into_iter().flatten().collect(),
        };
        let there = self.pieces.acknowledged(keys)?.into_iter();
        Ok((there.map(Option::unwrap_or_default).collect(), held))
    }

    /// All that a manifest names was acknowledged, as long as it says.
    fn check_there(&self, manifest: &Manifest) -> Result<(), Error> {
        let objects = manifest.objects.iter().map(|one| one.bytes).collect();
        for (what, space, keys, bytes) in [
            (
                "a piece",
                &self.pieces,
                manifest.keys(),
                manifest.piece_bytes.clone(),
            ),
            ("an object", &self.objects, manifest.object_keys(), objects),
        ] {
            if keys.is_empty() {
                continue;
            }
            let there = space.acknowledged(&keys)?.into_iter();
            if !there.eq(bytes.into_iter().map(Some)) {
                return Err(Error::NotStored {
                    what: what.to_owned(),
                    outcome: Outcome::Dropped,
                });
            }
        }
        Ok(())
    }

    /// Removes what sessions that were replaced have named, and no other does.
    fn clear_replaced(&self, by: &Manifest, mut gone: Vec<Manifest>) -> Result<(), Error> {
        let (pieces, objects) = (by.keys(), by.object_keys());
        gone.retain(|old| {
            let is_left =
                |keys: Vec<Key>, named: &[Key]| keys.iter().any(|key| !named.contains(key));
            is_left(old.keys(), &pieces) || is_left(old.object_keys(), &objects)
        });
        let Some(first) = by.links().first().copied().filter(|_| !gone.is_empty()) else {
            return Ok(());
        };
        let _nobody_names = self.naming.write();
        // Others may have saved some since. Where that is not known all of it stays.
        if let Err(error) = self.refresh() {
            tracing::warn!(%error,
                "cannot delete the blocks of a replaced session; the next sweep deletes the \
                 blocks");
            return Ok(());
        }
        self.clear(&gone, &self.beginning_with(first))
    }

    pub(crate) fn put(
        &self,
        what: &str,
        into: &Namespace,
        keys: Vec<Key>,
        buffers: BlockBuffers,
    ) -> Result<(), Error> {
        let bytes = (0..buffers.len()).map(|at| buffers.bytes(at)).sum();
        let task = into.put(keys, buffers)?;
        self.stored(what, &task, bytes)
    }

    /// Waits until parts are stored.
    pub(crate) fn stored(&self, what: &str, task: &Task, bytes: u64) -> Result<(), Error> {
        let waited = crate::store::wait(task, self.timeout, bytes);
        // The caller's memory is its own again when this returns, whatever has happened.
        task.wait_released(None)?;
        waited?;
        let lost = task
            .outcomes()
            .into_iter()
            .find(|one| *one != Outcome::Done);
        match lost {
            None => Ok(()),
            Some(outcome) => Err(Error::NotStored {
                what: what.to_owned(),
                outcome,
            }),
        }
    }
}

/// A step of a save has ended. Who listens may see where a save stands, and a test ends its process
/// there.
pub(crate) fn step(what: &'static str) {
    tracing::trace!(target: "kvdepot_session::step", step = what);
}

pub(crate) fn check_rows(buffers: &BlockBuffers, asked: usize) -> Result<(), Error> {
    if buffers.len() != asked {
        return Err(Error::input(
            "rows",
            format!("{} blocks", buffers.len()),
            format!("one block per run of tokens, {asked} in total"),
        ));
    }
    let wrong = (0..asked).find(|at| !(1..=PART_MAX).contains(&buffers.bytes(*at)));
    match wrong {
        None => Ok(()),
        Some(at) => {
            let value = format!("{} bytes", buffers.bytes(at));
            Err(Error::input(format!("rows[{at}]"), value, "1 byte to 1GiB"))
        }
    }
}
