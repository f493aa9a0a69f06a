//! A block's file, from the decision to write it until it is reserved.

use std::collections::hash_map::Entry;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvdepot_arena::format::file_header::LEN;
use kvdepot_arena::held::turn_len;
use kvdepot_arena::{Error, Identity, Key, NamespaceId, Place, Reserved, Wanted};
use kvdepot_host::dir::Seen;
use kvdepot_media::Checksum;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::{Open, Opened, State};
use crate::tier::posix::name::room_of;
use crate::tier::slots::Permits;

/// A block that this process has begun to write.
pub(crate) struct Making {
    open: Arc<Open>,
    name: Identity,
    made: bool,
}

impl Making {
    pub(super) fn new(open: &Arc<Open>, name: Identity) -> Making {
        Making {
            open: Arc::clone(open),
            name,
            made: false,
        }
    }

    /// Makes its file, with its space, which was taken in that epoch of the count.
    pub(crate) fn create(
        &mut self,
        wanted: &Wanted,
        epoch: u64,
        slot: &mut Permits,
    ) -> Result<Reserved, Error> {
        let open = Arc::clone(&self.open);
        let bytes = room_of(LEN as u64 + wanted.len);
        let unnamed = open.usage.unnamed(bytes);
        let direct = open.manner.is_direct();
        let (name, fd) = open.folder.create(&self.name, unnamed.is_some(), direct)?;
        // One that has a name is found.
        let unnamed = unnamed.filter(|_| name.is_none());
        let made = (|| {
            allocate(&fd, bytes).map_err(|errno| Error::Io {
                path: open.folder.path.clone(),
                source: errno.into(),
            })?;
            let inode = Seen::of(&fd)?.map_or(0, |seen| seen.inode);
            let file = open.block_file((fd, true), inode)?;
            let place = Place {
                len: wanted.len,
                parts: wanted.parts,
                stamp: wanted.stamp,
                ..Place::of(self.name)
            };
            let slot = slot
                .take()
                .ok_or(Error::Closed("internal error: file slot used twice"))?;
            let held = open.hold(
                (name.clone(), unnamed, epoch),
                (file, slot),
                (place, Vec::new()),
                Some(wanted.copy),
            );
            held.ok_or(Error::Closed("the tier is closed"))
        })();
        match made {
            Ok(place) => {
                self.made = true;
                Ok(Reserved::new(open as _, place))
            }
            Err(error) => {
                open.folder.drop_new(name.as_deref());
                Err(error)
            }
        }
    }
}

impl Open {
    /// Begins to write a block, unless this process does already.
    pub(crate) fn begin(self: &Arc<Open>, name: Identity) -> Option<Making> {
        match self.state.lock().writing.entry(name) {
            Entry::Occupied(_) => return None,
            Entry::Vacant(writing) => writing.insert(0),
        };
        Some(Making::new(self, name))
    }

    /// From now on a removal ends these, however long they take: who put them may have heard that
    /// they are not stored.
    pub(crate) fn publishes(&self, written: &[(Reserved, Checksum)]) {
        for some in written.chunks(turn_len()) {
            let mut state = self.state.lock();
            for (reserved, _) in some {
                if let Some(opened) = state.files.get_mut(&reserved.token.sequence) {
                    opened.copy = true;
                }
            }
        }
    }

    /// Copies of these that are being written are not published, nor is what waits for that.
    pub(crate) fn forget_copies(&self, namespace: NamespaceId, keys: Option<&[Key]>) {
        for some in keys.unwrap_or_default().chunks(turn_len()) {
            let mut state = self.state.lock();
            for key in some {
                let key = *key;
                state.forget_copy(&Identity { namespace, key });
            }
        }
        if keys.is_none() {
            let mut state = self.state.lock();
            let names = state.writing.keys();
            let names = names.filter(|name| name.namespace == namespace).copied();
            for name in names.collect::<Vec<_>>() {
                state.forget_copy(&name);
            }
        }
    }
}

impl State {
    /// Takes a file out, with its part of the count.
    pub(super) fn remove(&mut self, sequence: u64) -> Option<Opened> {
        let opened = self.files.remove(&sequence);
        let is_new = opened.as_ref().is_some_and(|opened| opened.new);
        self.new -= u64::from(is_new);
        opened
    }

    fn forget_copy(&mut self, name: &Identity) {
        let file = self.writing.get(name);
        if let Some(opened) = file.and_then(|sequence| self.files.get_mut(sequence)) {
            opened.removed |= opened.copy;
        }
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        if !self.made {
            self.open.state.lock().writing.remove(&self.name);
        }
    }
}

/// Gives a file its space, where the file system can; else what is missing shows when it is
/// written.
fn allocate(fd: &OwnedFd, bytes: u64) -> rustix::io::Result<()> {
    let flags = FallocateFlags::empty();
    match rustix::io::retry_on_intr(|| rustix::fs::fallocate(fd, flags, 0, bytes)) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            let about = rustix::fs::fstatvfs(fd);
            // One that knows no end says that it has no blocks at all.
            let free = |about: rustix::fs::StatVfs| match about.f_blocks {
                0 => u64::MAX,
                _ => about.f_bavail.saturating_mul(about.f_frsize),
            };
            if about.is_ok_and(|about| free(about) < bytes) {
                return Err(Errno::NOSPC);
            }
            rustix::fs::ftruncate(fd, bytes)
        }
        answer => answer,
    }
}
