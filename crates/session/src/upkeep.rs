//! Looking after sessions: what there is, whether it is sound, and what goes.

use std::collections::HashSet;

use kvdepot_store::{Key, Namespace};

use crate::chain::Link;
use crate::error::Error;
use crate::index::{Id, Index};
use crate::manifest::{Manifest, Reason};
use crate::save::step;
use crate::store::{Sessions, read_all};

/// Bytes of pieces that are read at a time to be looked at.
const LOOK_BYTES: u64 = 64 << 20;

/// Entry of a list of sessions.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Listed {
    /// ID of the session.
    pub id: Id,
    /// Number of tokens.
    pub tokens: usize,
    /// Length of the rendered text, in bytes.
    pub text_bytes: usize,
    /// Size of all pieces and objects in bytes, including those that other sessions share.
    pub bytes: u64,
    /// Time of the save, in Unix seconds.
    pub created: u64,
    /// Cause of the checkpoint.
    pub reason: Reason,
    /// Note of the engine or its user.
    pub note: String,
    /// True if the session failed verification or was incomplete at its last use.
    pub is_bad: bool,
}

/// Result of a verification of all bytes of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Checked {
    /// Number of pieces and objects.
    pub blocks: u64,
    /// Size of the verified pieces and objects, in bytes.
    pub bytes: u64,
    /// Names of the parts that are missing or fail checksum verification.
    pub missing: Vec<String>,
}

/// All that an index knows, the newest first.
pub(crate) fn listed(index: &Index) -> Vec<Listed> {
    let listed = index.entries().map(|(id, entry)| Listed {
        id,
        tokens: entry.tokens,
        text_bytes: entry.text_bytes,
        bytes: entry.bytes,
        created: entry.created,
        reason: entry.reason,
        note: entry.note.clone(),
        is_bad: entry.is_bad,
    });
    let mut listed: Vec<Listed> = listed.collect();
    listed.sort_by_key(|one| (std::cmp::Reverse(one.created), one.id));
    listed
}

impl Sessions {
    /// Returns all sessions in the index, newest first.
    #[must_use]
    pub fn list(&self) -> Vec<Listed> {
        listed(&self.index.read())
    }

    /// Reads all parts of the session `id`, and returns those that are missing or fail checksum
    /// verification.
    ///
    /// If there are any, lookups skip the session until it is saved again or
    /// [`refresh`](Sessions::refresh) is called.
    ///
    /// # Errors
    /// * [`Error::Unknown`] if there is no session `id`.
    /// * [`Error::Malformed`] if its manifest cannot be decoded.
    /// * [`Error::Depot`] if the depot fails.
    pub fn verify(&self, id: Id) -> Result<Checked, Error> {
        let mut checked = Checked::default();
        let manifest = match self.manifest(id) {
            Ok(manifest) => manifest,
            Err(Error::Unknown(_)) if self.index.read().entry(id).is_some() => {
                checked.missing.push("its manifest".to_owned());
                return Ok(checked);
            }
            Err(error) => return Err(error),
        };
        let pieces = manifest
            .keys()
            .into_iter()
            .zip(manifest.piece_bytes.iter().copied());
        let named = pieces
            .enumerate()
            .map(|(at, block)| (format!("piece {at}"), block));
        self.look(&self.pieces, named.collect(), &mut checked)?;
        let objects = manifest.object_keys().into_iter().zip(&manifest.objects);
        let named = objects.map(|(key, one)| (format!("object {:?}", one.name), (key, one.bytes)));
        self.look(&self.objects, named.collect(), &mut checked)?;
        if !checked.missing.is_empty() {
            self.index.write().quarantine(id);
        }
        Ok(checked)
    }

    fn look(
        &self,
        from: &Namespace,
        blocks: Vec<(String, (Key, u64))>,
        checked: &mut Checked,
    ) -> Result<(), Error> {
        let mut rest = &blocks[..];
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |(_, (_, len)): &&(String, (Key, u64))| {
                bytes += len;
                bytes <= LOOK_BYTES
            };
            let count = rest.iter().take_while(fits).count().max(1);
            let (some, later) = rest.split_at(count);
            rest = later;
            let wanted: Vec<(Key, u64)> = some.iter().map(|(_, block)| *block).collect();
            let read = read_all(from, &wanted, self.timeout)?;
            for ((name, (_, len)), read) in some.iter().zip(read) {
                checked.blocks += 1;
                match read {
                    Some(_) => checked.bytes += len,
                    None => checked.missing.push(name.clone()),
                }
            }
        }
        Ok(())
    }

    /// Removes the session `id`: first its manifest, then the parts that only this session names.
    ///
    /// A save that runs at the same time in another process fails or is complete. The exception is
    /// a save that ends between the last check of the names and the removal.
    ///
    /// If the session has another format version, only its manifest is removed. The names of its
    /// parts are unknown; [`sweep`](Sessions::sweep) removes them.
    ///
    /// # Errors
    /// [`Error::Unknown`] if there is no session `id`, and [`Error::Depot`] if the depot fails.
    pub fn remove(&self, id: Id) -> Result<(), Error> {
        let manifest = match self.manifest(id) {
            Err(Error::Unknown(_)) => match self.unread(id)? {
                Some(key) => return Ok(self.manifests.remove(&[key]).map(drop)?),
                None => self.manifest(id)?,
            },
            manifest => manifest?,
        };
        let unknown = || Error::Unknown(id.to_string());
        let entry = self.index.read().entry(id).cloned().ok_or_else(unknown)?;
        self.manifests.remove(&[entry.key])?;
        self.index.write().remove(id);
        step("the manifest is removed");
        self.forget_uses(&[id])?;
        let _nobody_names = self.naming.write();
        // Others may have saved some since.
        self.refresh()?;
        self.clear(&[manifest], &self.beginning_with(entry.first))
    }

    /// The key of a manifest that is there and that this release does not read, after a look at
    /// what others have saved.
    fn unread(&self, id: Id) -> Result<Option<Key>, Error> {
        self.refresh()?;
        if self.index.read().entry(id).is_some() {
            return Ok(None);
        }
        let listed = self.manifests.blocks()?.into_iter().map(|(key, _)| key);
        Ok(listed.into_iter().find(|key| Id::of(key) == id))
    }

    /// Removes what sessions that went have named, but for what these name; nothing where one of
    /// these cannot be read.
    pub(crate) fn clear(&self, gone: &[Manifest], others: &[Id]) -> Result<(), Error> {
        let mut parts = Parts::default();
        gone.iter().for_each(|manifest| parts.add(manifest));
        self.clear_parts(parts, others)
    }

    /// Removes what a save that has come to nothing has stored, but for what sessions name that
    /// have the same first piece: no others can.
    pub(crate) fn undo(&self, first: Link, parts: Parts) -> Result<(), Error> {
        if parts.is_empty() {
            return Ok(());
        }
        let _nobody_names = self.naming.write();
        // Others may have saved some since.
        self.refresh()?;
        self.clear_parts(parts, &self.beginning_with(first))
    }

    /// Removes all pieces and objects that are in no session, for example those of killed or failed
    /// saves.
    ///
    /// Returns the number of removed blocks. Do not save at the same time: a save whose part is
    /// removed fails.
    ///
    /// If a session of another format version exists, the call removes nothing, logs its ID, and
    /// returns 0. [`remove`](Sessions::remove) accepts that ID.
    ///
    /// # Errors
    /// [`Error::Unknown`] if a manifest cannot be read, and [`Error::Depot`] if the depot fails.
    pub fn sweep(&self) -> Result<usize, Error> {
        let _nobody_names = self.naming.write();
        self.refresh()?;
        let all = |space: &Namespace| -> Result<HashSet<Key>, Error> {
            Ok(space.blocks()?.into_iter().map(|(key, _)| key).collect())
        };
        let mut parts = Parts {
            pieces: all(&self.pieces)?,
            objects: all(&self.objects)?,
        };
        for (key, len) in self.manifests.blocks()? {
            let read = read_all(&self.manifests, &[(key, len)], self.timeout)?;
            let bytes = read.into_iter().next().flatten();
            let bytes = bytes.ok_or_else(|| Error::Unknown(Id::of(&key).to_string()))?;
            match Manifest::decode(&bytes) {
                Ok(manifest) => parts.keep(&manifest),
                Err(error) => {
                    let session = Id::of(&key);
                    tracing::warn!(%session, %error,
                        "cannot read a session; sweep ended without deleting blocks");
                    return Ok(0);
                }
            }
        }
        self.remove_parts(parts)
    }

    /// Sessions that have this first piece: they alone may share some.
    pub(crate) fn beginning_with(&self, first: Link) -> Vec<Id> {
        let index = self.index.read();
        let same = index.entries().filter(|(_, other)| other.first == first);
        same.map(|(id, _)| id).collect()
    }

    fn clear_parts(&self, mut parts: Parts, others: &[Id]) -> Result<(), Error> {
        for other in others {
            match self.manifest(*other) {
                Ok(manifest) => parts.keep(&manifest),
                // It may name any of it, unless it went meanwhile: what is left then is found by
                // the next save, or evicted.
                Err(Error::Unknown(_) | Error::Malformed { .. }) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        self.remove_parts(parts).map(drop)
    }

    fn remove_parts(&self, parts: Parts) -> Result<usize, Error> {
        let pieces = self.pieces.remove(&Vec::from_iter(parts.pieces))?;
        step("pieces are removed");
        Ok(pieces + self.objects.remove(&Vec::from_iter(parts.objects))?)
    }
}

/// Pieces and objects that are to go.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    pub(crate) pieces: HashSet<Key>,
    pub(crate) objects: HashSet<Key>,
}

impl Parts {
    fn is_empty(&self) -> bool {
        self.pieces.is_empty() && self.objects.is_empty()
    }

    fn add(&mut self, manifest: &Manifest) {
        self.pieces.extend(manifest.keys());
        self.objects.extend(manifest.object_keys());
    }

    /// What a session names stays.
    fn keep(&mut self, manifest: &Manifest) {
        manifest.keys().iter().for_each(|key| {
            self.pieces.remove(key);
        });
        manifest.object_keys().iter().for_each(|key| {
            self.objects.remove(key);
        });
    }
}
