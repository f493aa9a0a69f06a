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

/// Data with which a process of the server's user reads blocks of a tier on other hosts.
#[derive(Clone)]
pub struct DoorKey {
    /// Name of the tier. [`know_door`] registers the function that opens a remote reader for its
    /// kind.
    pub name: &'static str,
    /// Parameters of the remote reader. They contain secrets, and are sent only to processes of
    /// this user.
    pub bytes: Arc<[u8]>,
}

impl fmt::Debug for DoorKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DoorKey")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// Remote reader: reads blocks of other hosts.
pub trait Door: Send + Sync {
    /// Requests blocks that the server has pinned, each with its payload length, without waiting.
    ///
    /// If a host rejects a block, reading it fails.
    fn borrow(&self, blocks: &[(&Outside, u64)]) -> Vec<Option<Box<dyn Borrowed>>>;
}

/// A block of another host that can be read while the value exists.
pub trait Borrowed: Send + Sync {
    /// Returns a buffer of `len` bytes of the payload from `offset` on, for reading.
    fn buffer(&self, offset: u64, len: u64) -> Buffer;
}

type Opens = fn(&[u8]) -> Result<Arc<dyn Door>, Error>;

static KNOWN: Mutex<Vec<(&str, Opens)>> = Mutex::new(Vec::new());

/// Registers the remote reader of a kind of tier in this process.
///
/// A program calls it before it attaches to a depot. `opens` receives the bytes of a [`DoorKey`].
pub fn know_door(name: &'static str, opens: Opens) {
    let mut known = KNOWN.lock();
    known.retain(|(other, _)| *other != name);
    known.push((name, opens));
}

/// Opens the remote reader of tier `name`, or returns `None` if its kind is not registered.
///
/// # Errors
///
/// Those of the registered function.
pub fn open_door(name: &str, key: &[u8]) -> Result<Option<Arc<dyn Door>>, Error> {
    let known = KNOWN.lock().iter().find(|(kind, _)| *kind == name).copied();
    known.map(|(_, opens)| opens(key)).transpose()
}
