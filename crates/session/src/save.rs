//! Saving: what is not there yet, and then the manifest.

use std::ops::Range;

use kvdepot_store::{BlockBuffers, Buffer, Key, Namespace, Outcome, Pin};

use crate::chain::{Link, bytes_of};
use crate::error::Error;
use crate::index::Id;
use crate::manifest::{Manifest, Named, Reason};
use crate::store::{MANIFEST_MAX, Sessions, read_all};

/// A state that is to be kept.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "made from its fields")]
pub struct Checkpoint<'a> {
    /// Its tokens, all of them.
    pub tokens: &'a [u32],
    /// What they were rendered from, where the engine knows it: it is found by that, too.
    pub text: &'a [u8],
    /// Why it is made.
    pub reason: Reason,
    /// Tokens that the engine has room for.
    pub context_tokens: u32,
    /// Parts that do not grow with the tokens: name and bytes.
    pub objects: Vec<(String, Buffer)>,
    /// What the engine, or who it is for, notes.
    pub note: String,
    /// When it is made, in Unix seconds.
    pub created: u64,
    /// Whether it comes back to the bit. Engines that compute a prompt in other steps may have
    /// other last bits for the same tokens, and any of those will do: what is there is not asked
    /// for. With this, all is asked for, and what differs from what is there is stored beside it.
    pub exact: bool,
}

/// What an engine is asked for: the rows of these runs of tokens, one block's buffers for each.
pub type Rows<'a> = dyn FnOnce(&[Range<usize>]) -> Result<BlockBuffers, Error> + 'a;

/// What became of a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Saved {
    /// The session's name.
    pub id: Id,
    /// Tokens whose pieces were there already.
    pub cached_tokens: usize,
    /// Tokens whose pieces were written.
    pub cache_write_tokens: usize,
    /// Bytes that were written, with objects and manifest.
    pub bytes_written: u64,
}

/// The pieces of a session: their keys, and their bytes, 0 for one that is not there.
struct Pieces {
    keys: Vec<Key>,
    bytes: Vec<u64>,
    variants: Vec<(u32, [u8; 32])>,
}

impl Pieces {
    fn missing(&self) -> Vec<usize> {
        (0..self.keys.len())
            .filter(|at| self.bytes[*at] == 0)
            .collect()
    }
}

/// Pins that end with the save.
struct Held<'a> {
    space: &'a Namespace,
    pins: Vec<Pin>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.space.unpin(&self.pins, false);
    }
}

impl Sessions {
    /// Saves a checkpoint. `rows` is asked once, for the pieces that are not there, in their order;
    /// it may give the engine's own memory, which is read until this returns. A session that is
    /// there already is true at once.
    ///
    /// # Errors
    /// [`Error::NotStored`] where something found no room, or the depot lost it: then there is no
    /// session. [`Error::Input`] for what cannot be, before a byte moves.
    pub fn save(&self, checkpoint: Checkpoint<'_>, rows: Box<Rows<'_>>) -> Result<Saved, Error> {
        let count = checkpoint.tokens.len();
        if count == 0 {
            return Err(Error::input("tokens", "none", "at least one"));
        }
        let empty = checkpoint
            .objects
            .iter()
            .find(|(_, bytes)| bytes.is_empty());
        if let Some((name, _)) = empty {
            return Err(Error::input(
                format!("objects[{name:?}]"),
                "0 bytes",
                "at least one byte",
            ));
        }
        let cut = crate::chain::Cut::of_tokens(self.piece_tokens);
        let links = cut.links(&bytes_of(checkpoint.tokens));
        let Some(end) = links.last().copied() else {
            return Err(Error::input("tokens", "none", "at least one"));
        };
        let keys: Vec<Key> = links.iter().map(|link| link.key()).collect();
        // What is there stays until the manifest names it.
        let pins = self.pieces.pin(&keys, false)?;
        let there = pins
            .iter()
            .map(|pin| pin.as_ref().map_or(0, Pin::bytes))
            .collect();
        let _held = Held {
            space: &self.pieces,
            pins: pins.into_iter().flatten().collect(),
        };
        let mut pieces = Pieces {
            keys,
            bytes: there,
            variants: Vec::new(),
        };
        let missing = pieces.missing();
        let asked = match checkpoint.exact {
            true => (0..links.len()).collect(),
            false => missing.clone(),
        };
        let each = self.piece_tokens as usize;
        let run = |piece: &usize| piece * each..((piece + 1) * each).min(count);
        let mut bytes_written = 0;
        if !asked.is_empty() {
            let runs: Vec<Range<usize>> = asked.iter().map(run).collect();
            let buffers = rows(&runs)?;
            if buffers.len() != asked.len() {
                return Err(Error::input(
                    "rows",
                    format!("{} blocks", buffers.len()),
                    format!("one for each of {} runs of tokens", asked.len()),
                ));
            }
            bytes_written = self.put_pieces(&mut pieces, &links, &asked, &buffers)?;
        }
        let cache_write_tokens = missing.iter().map(|piece| run(piece).len()).sum();
        let objects = self.put_objects(end, &checkpoint.objects)?;
        bytes_written += objects.iter().map(|one| one.bytes).sum::<u64>();
        let manifest = self.describe(checkpoint, pieces, objects);
        let (id, len) = self.put_manifest(end, &manifest)?;
        Ok(Saved {
            id,
            cached_tokens: count - cache_write_tokens,
            cache_write_tokens,
            bytes_written: bytes_written + len,
        })
    }

    /// Stores pieces that are not there, or not so; their bytes.
    fn put_pieces(
        &self,
        pieces: &mut Pieces,
        links: &[Link],
        asked: &[usize],
        buffers: &BlockBuffers,
    ) -> Result<u64, Error> {
        let (mut keys, mut written, mut bytes) = (Vec::new(), BlockBuffers::default(), 0);
        for (at, piece) in asked.iter().copied().enumerate() {
            if pieces.bytes[piece] > 0 {
                let block = (pieces.keys[piece], pieces.bytes[piece]);
                let there = read_all(&self.pieces, &[block], self.timeout)?
                    .pop()
                    .flatten();
                let new: Vec<u8> = buffers.pieces(at).iter().flat_map(Buffer::to_vec).collect();
                if there.is_some_and(|there| there == new) {
                    continue;
                }
                let key = links[piece].variant(blake3::hash(&new).as_bytes());
                pieces.variants.push((piece as u32, key.0));
                pieces.keys[piece] = key;
            }
            keys.push(pieces.keys[piece]);
            written.push(buffers.pieces(at).iter().cloned());
            pieces.bytes[piece] = buffers.bytes(at);
            bytes += buffers.bytes(at);
        }
        if !keys.is_empty() {
            self.put("a piece", &self.pieces, keys, written)?;
        }
        Ok(bytes)
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

    fn put_objects(&self, end: Link, objects: &[(String, Buffer)]) -> Result<Vec<Named>, Error> {
        if objects.is_empty() {
            return Ok(Vec::new());
        }
        let named = objects.iter().map(|(name, bytes)| Named {
            name: name.clone(),
            bytes: bytes.len() as u64,
            sum: *blake3::hash(&bytes.to_vec()).as_bytes(),
        });
        let named: Vec<Named> = named.collect();
        let keys = named.iter().map(|one| end.object(&one.name, &one.sum));
        let buffers = BlockBuffers::whole(objects.iter().map(|(_, bytes)| bytes.clone()));
        self.put("an object", &self.objects, keys.collect(), buffers)?;
        Ok(named)
    }

    /// Commits a session, whose pieces and objects are there.
    pub(crate) fn put_manifest(&self, end: Link, manifest: &Manifest) -> Result<(Id, u64), Error> {
        let bytes = manifest.encode()?;
        let len = bytes.len() as u64;
        if len > MANIFEST_MAX {
            return Err(Error::input(
                "tokens",
                manifest.tokens.len(),
                "fewer: a manifest has at most 256MiB",
            ));
        }
        let key = end.manifest();
        let buffers = BlockBuffers::whole([Buffer::from_vec(bytes)]);
        // One that is there already may say something else of the same state: the new one holds.
        if self.index.read().entry(Id::of(&key)).is_some() {
            self.manifests.remove(&[key])?;
        }
        self.put("the manifest", &self.manifests, vec![key], buffers)?;
        Ok((self.index.write().add(key, len, manifest), len))
    }

    pub(crate) fn put(
        &self,
        what: &str,
        into: &Namespace,
        keys: Vec<Key>,
        buffers: BlockBuffers,
    ) -> Result<(), Error> {
        let task = into.put(keys, buffers)?;
        let waited = crate::store::wait(&task, self.timeout);
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
