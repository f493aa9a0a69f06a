//! How often sessions were restored, and when last: what `ls` says, and what stays where room is
//! short.
//!
//! A session is never written to again; what is counted is a small block beside it, in a namespace
//! of its own: a byte that is the version (1), u64 restores, u64 Unix seconds of the last,
//! little-endian. It is advice: two processes that count at the same moment may count one restore,
//! a process that is killed forgets its last minute, and a tier may evict it. Nothing else depends
//! on it.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use kvdepot_store::{BlockBuffers, Buffer, Key};

use crate::error::Error;
use crate::index::Id;
use crate::store::{Sessions, read_all};

const VERSION: u8 = 1;
const LEN: usize = 17;

/// Seconds between two writes for one session: a busy one costs a small block a minute.
const EACH: u64 = 60;

/// Use of a session. The numbers are approximate: two restores at the same moment may count as one,
/// and a killed process loses its last minute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Number of restores by all processes.
    pub hits: u64,
    /// Time of the last restore, in Unix seconds; 0 if there was no restore.
    pub used: u64,
}

impl Usage {
    fn encode(self) -> Vec<u8> {
        let mut bytes = vec![VERSION];
        bytes.extend_from_slice(&self.hits.to_le_bytes());
        bytes.extend_from_slice(&self.used.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Usage> {
        let (version, numbers) = bytes.split_first()?;
        let (hits, used) = numbers.split_first_chunk::<8>()?;
        let used: [u8; 8] = used.try_into().ok()?;
        (*version == VERSION).then(|| Usage {
            hits: u64::from_le_bytes(*hits),
            used: u64::from_le_bytes(used),
        })
    }
}

fn key_of(id: Id) -> Key {
    Key(blake3::derive_key("kvdepot session use 1", &id.0))
}

pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

impl Sessions {
    /// Returns the use of each session in `ids`, including restores that this process has not
    /// stored yet.
    ///
    /// # Errors
    /// [`Error::Depot`] if the depot fails.
    pub fn usage(&self, ids: &[Id]) -> Result<Vec<Usage>, Error> {
        let keys: Vec<Key> = ids.iter().map(|id| key_of(*id)).collect();
        let mut said = vec![Usage::default(); ids.len()];
        // Most sessions were never restored: what is not there is not read.
        let there: Vec<usize> = self
            .uses
            .contains(&keys)?
            .iter()
            .enumerate()
            .filter_map(|(at, there)| there.then_some(at))
            .collect();
        let blocks: Vec<(Key, u64)> = there.iter().map(|at| (keys[*at], LEN as u64)).collect();
        let read = read_all(&self.uses, &blocks, self.timeout)?;
        for (at, bytes) in there.into_iter().zip(read) {
            said[at] = bytes
                .and_then(|bytes| Usage::decode(&bytes))
                .unwrap_or_default();
        }
        let counted = self.counted.lock();
        for (one, id) in said.iter_mut().zip(ids) {
            if let Some(pending) = counted.sessions.get(id) {
                one.hits = one.hits.saturating_add(pending.hits);
                one.used = one.used.max(pending.used);
            }
        }
        Ok(said)
    }

    /// Counts a restore of the session `id`, for callers that read all of its parts themselves.
    ///
    /// [`restore`](Sessions::restore) counts automatically. Errors are logged only.
    pub fn count_use(&self, id: Id) {
        let now = now();
        let is_due = {
            let mut counted = self.counted.lock();
            let pending = counted.sessions.entry(id).or_default();
            pending.hits += 1;
            pending.used = pending.used.max(now);
            now.saturating_sub(pending.written) >= EACH
        };
        if is_due {
            self.write_use(id, now);
        }
    }

    /// Writes what was counted of all sessions.
    pub(crate) fn write_uses(&self) {
        let ids: Vec<Id> = {
            let counted = self.counted.lock();
            let pending = counted.sessions.iter().filter(|(_, one)| one.hits > 0);
            pending.map(|(id, _)| *id).collect()
        };
        let now = now();
        ids.into_iter().for_each(|id| self.write_use(id, now));
    }

    fn write_use(&self, id: Id, now: u64) {
        let said = match self.usage(&[id]) {
            Ok(said) => said.first().copied().unwrap_or_default(),
            Err(error) => {
                tracing::debug!(%error, session = %id, "cannot update the use count of a session; \
                                                        it is updated later");
                return;
            }
        };
        let counted = {
            let mut counted = self.counted.lock();
            let pending = counted.sessions.entry(id).or_default();
            pending.written = now;
            std::mem::take(&mut pending.hits)
        };
        let key = key_of(id);
        let block = BlockBuffers::whole([Buffer::from_vec(said.encode())]);
        let written = self
            .uses
            .remove(&[key])
            .map_err(Error::from)
            .and_then(|_| self.put("a count", &self.uses, vec![key], block));
        if let Err(error) = written {
            tracing::debug!(%error, session = %id, "cannot update the use count of a session; it \
                                                    is updated later");
            let mut all = self.counted.lock();
            all.sessions.entry(id).or_default().hits += counted;
        }
    }

    /// Sessions that have gone are not counted any more.
    pub(crate) fn forget_uses(&self, ids: &[Id]) -> Result<(), Error> {
        let gone: HashSet<Id> = ids.iter().copied().collect();
        self.counted
            .lock()
            .sessions
            .retain(|id, _| !gone.contains(id));
        let keys: Vec<Key> = ids.iter().map(|id| key_of(*id)).collect();
        self.uses.remove(&keys)?;
        Ok(())
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        // The last of those that count together.
        if Arc::strong_count(&self.counted) == 1 {
            self.write_uses();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_nothing_else() {
        let said = Usage {
            hits: 7,
            used: 1_800_000_000,
        };
        let bytes = said.encode();
        assert_eq!((bytes.len(), Usage::decode(&bytes)), (LEN, Some(said)));
        assert_eq!(Usage::decode(&bytes[..16]), None);
        assert_eq!(Usage::decode(&[&bytes[..], &[0]].concat()), None);
        assert_eq!(Usage::decode(&[&[2], &bytes[1..]].concat()), None);
    }
}
