//! The times of files: when their blocks were used.

use kvdepot_arena::Identity;
use kvdepot_host::dir::{Seen, mark_used, mark_used_at};

use super::Open;
use crate::tier::BlockFile;

impl Open {
    /// Moves a file's time to that of a use, which other processes see, if many of their blocks
    /// were replaced since, and as far as that is possible.
    pub(super) fn mark_used(&self, used: Option<i64>, file: &BlockFile, seen: &Seen) {
        let Some(time) = used else { return };
        if i128::from(time) - seen.changed > self.usage.marking_interval()
            && let Ok(fd) = file.raw().fd()
        {
            let _best_effort = mark_used_at(fd, time).or_else(|_| mark_used(fd));
        }
    }

    /// Notes that blocks with these stamps are used, at the times that are returned.
    pub(in super::super) fn note_used(
        &self,
        used: impl Iterator<Item = (Identity, u64)>,
    ) -> Vec<i64> {
        self.uses.note(used, self.folder.now())
    }

    /// The time before which files may be evicted for a block with that stamp.
    pub(in super::super) fn limit_of(&self, stamp: u64) -> i64 {
        self.uses.limit(stamp, self.folder.now())
    }

    /// When a block was used last, as far as it is known here.
    pub(in super::super) fn used_at(&self, name: &Identity) -> Option<i64> {
        self.uses.last(name)
    }

    /// Has the file of a block that is stored say where in its prompt it stands.
    pub(super) fn mark_stored(&self, file: &BlockFile, stamp: u64) {
        if let Ok(fd) = file.raw().fd() {
            let _best_effort = mark_used_at(fd, self.uses.of(stamp, self.folder.now()));
        }
    }
}
