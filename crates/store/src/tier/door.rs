//! Doors: how processes that work for a depot reach, by themselves, blocks that lie on other hosts.
//!
//! The owner pins a block and says where it lies ([`Outside`]); a worker has its door, made of what
//! the owner has handed to it, bring the bytes straight into memory of its own. What it brings is
//! verified there, as everything else.

use std::fmt;
use std::sync::Arc;

use kvdepot_arena::Error;
use kvdepot_media::Buffer;
use parking_lot::Mutex;

use super::outside::Outside;

/// What a process of the owner's user needs to reach blocks of a tier.
#[derive(Clone)]
pub struct DoorKey {
    /// The tier's name, whose kind [knows](know_door) how to open it.
    pub name: &'static str,
    /// Secrets among it: it goes to no other user.
    pub bytes: Arc<[u8]>,
}

impl fmt::Debug for DoorKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DoorKey")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// A way to blocks on other hosts.
pub trait Door: Send + Sync {
    /// Asks for blocks that the owner has pinned, each with the length of its payload, without
    /// waiting. What a host does not lend fails when it is read.
    fn borrow(&self, blocks: &[(&Outside, u64)]) -> Vec<Option<Box<dyn Borrowed>>>;
}

/// A block that is read through a door, as long as this lives.
pub trait Borrowed: Send + Sync {
    /// `len` bytes of its payload from `offset` on, to be read.
    fn buffer(&self, offset: u64, len: u64) -> Buffer;
}

type Opens = fn(&[u8]) -> Result<Arc<dyn Door>, Error>;

static KNOWN: Mutex<Vec<(&str, Opens)>> = Mutex::new(Vec::new());

/// Has this process open doors to tiers of a kind: a program says so before it attaches anywhere.
pub fn know_door(name: &'static str, opens: Opens) {
    let mut known = KNOWN.lock();
    known.retain(|(other, _)| *other != name);
    known.push((name, opens));
}

/// Opens the door to a tier; `None` where this process knows none of that kind.
///
/// # Errors
/// Those of the kind.
pub fn open_door(name: &str, key: &[u8]) -> Result<Option<Arc<dyn Door>>, Error> {
    let known = KNOWN.lock().iter().find(|(kind, _)| *kind == name).copied();
    known.map(|(_, opens)| opens(key)).transpose()
}
