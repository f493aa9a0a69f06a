//! Memory of this process that batches may use: what was registered, by address.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvdepot_media::{Buffer, Owner};
use parking_lot::RwLock;

use crate::error::Error;

/// A region that was registered.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    at: u64,
    len: u64,
    writable: bool,
    pub(crate) owner: Owner,
}

impl Region {
    /// Any memory, which `owner` keeps.
    ///
    /// # Safety
    ///
    /// It is only used for ranges that `owner` keeps readable, and those that are read into
    /// writable and nobody else's.
    pub(crate) unsafe fn any(owner: Owner) -> Region {
        Region {
            at: 0,
            len: u64::MAX,
            writable: true,
            owner,
        }
    }

    /// Whether all of this lies in it.
    pub(crate) fn has(&self, at: u64, len: u64) -> bool {
        // No region ends beyond the address space, so neither sum overflows where this holds.
        at >= self.at && len <= self.len && at - self.at <= self.len - len
    }

    /// It, as batches and devices use it.
    pub(crate) fn buffer(&self) -> Buffer {
        let (at, len) = (self.at as usize, self.len as usize);
        // SAFETY: it was made of a buffer of this memory and these rights, whose owner it has.
        unsafe { Buffer::from_raw(at, len, self.writable, Arc::clone(&self.owner)) }
    }

    /// Whether reads may go there.
    pub(crate) fn is_writable(&self) -> bool {
        self.writable
    }
}

/// What is registered.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    regions: RwLock<BTreeMap<u64, Region>>,
}

impl Memory {
    /// Registers all of these or none.
    pub(crate) fn register(&self, buffers: &[Buffer]) -> Result<Vec<u64>, Error> {
        for buffer in buffers {
            if !buffer.is_memory() || buffer.is_empty() {
                let value = format!("{buffer:?}");
                let allowed = "host memory of at least one byte";
                return Err(Error::input("buffers", value, allowed));
            }
        }
        let mut regions = self.regions.write();
        let mut added = Vec::with_capacity(buffers.len());
        for buffer in buffers {
            let region = Region {
                at: buffer.addr() as u64,
                len: buffer.len() as u64,
                writable: buffer.is_writable(),
                owner: Arc::clone(buffer.owner()),
            };
            let before = regions.range(..region.at + region.len).next_back();
            if before.is_some_and(|(_, other)| other.at + other.len > region.at) {
                for at in &added {
                    regions.remove(at);
                }
                let value = format!("{:#x}, {} bytes", region.at, region.len);
                let allowed = "memory that is not registered yet";
                return Err(Error::input("buffers", value, allowed));
            }
            added.push(region.at);
            regions.insert(region.at, region);
        }
        Ok(added)
    }

    /// Forgets regions, by their addresses. Batches that use them keep them until they end.
    pub(crate) fn forget(&self, regions: &[u64]) {
        let mut all = self.regions.write();
        for at in regions {
            all.remove(at);
        }
    }

    /// What has this region alone.
    pub(crate) fn of(region: Region) -> Memory {
        Memory {
            regions: RwLock::new(BTreeMap::from([(region.at, region)])),
        }
    }

    /// Looks regions up, with nothing changed meanwhile.
    pub(crate) fn look<R>(&self, with: impl FnOnce(&Lookup<'_>) -> R) -> R {
        with(&Lookup(&self.regions.read()))
    }
}

/// The regions, while nobody changes them.
pub(crate) struct Lookup<'a>(&'a BTreeMap<u64, Region>);

impl Lookup<'_> {
    /// The region that has all of this.
    pub(crate) fn find(&self, at: u64, len: u64) -> Option<&Region> {
        let (_, region) = self.0.range(..=at).next_back()?;
        region.has(at, len).then_some(region)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lies_in_a_region_whole_is_found() {
        let memory = Memory::default();
        let buffer = Buffer::from_vec(vec![0; 100]);
        let at = buffer.addr() as u64;
        let part = buffer.slice(10, 80).unwrap();
        let held = memory.register(std::slice::from_ref(&part)).unwrap();
        let found = |at, len| memory.look(|all| all.find(at, len).is_some());
        assert!(found(at + 10, 80) && found(at + 89, 1) && found(at + 90, 0));
        assert!(!found(at + 9, 2) && !found(at + 10, 81) && !found(at + 89, u64::MAX));
        let again = memory.register(&[buffer.slice(0, 11).unwrap()]);
        assert!(
            again
                .unwrap_err()
                .to_string()
                .contains("not registered yet")
        );
        memory.forget(&held);
        assert!(!found(at + 10, 80));
        memory.register(&[buffer]).unwrap();
    }

    #[test]
    fn of_several_all_are_registered_or_none() {
        let memory = Memory::default();
        let buffer = Buffer::from_vec(vec![0; 100]);
        let parts = [(0, 50), (60, 10), (65, 10)].map(|(at, len)| buffer.slice(at, len).unwrap());
        assert!(memory.register(&parts).is_err());
        assert!(memory.look(|all| all.find(buffer.addr() as u64, 1).is_none()));
    }
}
