//! Doors to blocks on other hosts, which a worker opens with what its owner has handed to it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use kvdepot_arena::Error;
use kvdepot_host::fork::LockFd;
use kvdepot_store::placement::Placement;
use kvdepot_store::{Borrowed, Door, Outside, open_door};
use parking_lot::RwLock;

use crate::frame::hello::{Kind, Medium};

/// Longest key: settings of a tier.
const KEY_MAX: u64 = 1 << 20;

/// The doors, by the numbers of their tiers.
#[derive(Default)]
pub(crate) struct Doors(RwLock<Vec<(u32, Arc<dyn Door>)>>);

/// Blocks of a call, each by its index in it, as long as they are read.
pub(crate) type Borrows = Vec<(usize, Box<dyn Borrowed>)>;

impl Doors {
    /// Takes the keys out of what a welcome has brought, and opens what is not open yet.
    pub(crate) fn learn(&self, media: &mut Vec<(Medium, LockFd)>) {
        let keys = media.extract_if(.., |(medium, _)| medium.kind == Kind::Door);
        for (medium, fd) in keys {
            let mut doors = self.0.write();
            if doors.iter().any(|(number, _)| *number == medium.number) {
                continue;
            }
            match open(&medium, &fd) {
                Ok(Some(door)) => doors.push((medium.number, door)),
                // Everything else is reached all the same.
                Ok(None) => tracing::warn!(
                    "worker has no reader for blocks of other hosts; these blocks are misses"
                ),
                Err(error) => tracing::warn!(%error,
                    "cannot connect the worker to other hosts; blocks of other hosts are misses"),
            }
        }
    }

    /// The owner is gone.
    pub(crate) fn let_go(&self) {
        self.0.write().clear();
    }

    /// Asks for those blocks of a call that lie behind doors; in the order of the call.
    pub(crate) fn borrow(&self, placements: &[Option<Placement>]) -> Borrows {
        let doors = self.0.read().clone();
        let mut borrows = Borrows::new();
        for (tier, door) in doors {
            let each = placements.iter().enumerate();
            let mine = each.filter_map(|(index, placement)| {
                let placement = placement.as_ref().filter(|one| one.medium == tier)?;
                Some((index, (placement.outside.as_ref()?, placement.len)))
            });
            let (indices, wanted): (Vec<usize>, Vec<(&Outside, u64)>) = mine.unzip();
            let got = indices.into_iter().zip(door.borrow(&wanted));
            borrows.extend(got.filter_map(|(index, one)| Some((index, one?))));
        }
        borrows.sort_by_key(|(index, _)| *index);
        borrows
    }
}

fn open(medium: &Medium, fd: &LockFd) -> Result<Option<Arc<dyn Door>>, Error> {
    let io = |source| Error::Io {
        path: "cannot exchange the address of a remote reader".into(),
        source,
    };
    let file = File::from(fd.fd()?.try_clone_to_owned().map_err(io)?);
    let mut said = vec![0; medium.len.min(KEY_MAX) as usize];
    file.read_exact_at(&mut said, 0).map_err(io)?;
    let end = said.iter().position(|byte| *byte == b'\n');
    let Some((name, key)) = end.map(|end| (&said[..end], &said[end + 1..])) else {
        return Ok(None);
    };
    open_door(&String::from_utf8_lossy(name), key)
}
