//! The times of files: when their blocks were used.

use kvdepot_arena::Identity;
use kvdepot_host::dir::{Seen, mark_used, mark_used_at};

use super::Open;
use crate::tier::BlockFile;

impl Open {
    /// Notes a use. What others see of it, a file's time, is moved when much of what they keep has
    /// been replaced since, as far as that is possible.
    pub(super) fn mark_used(
        &self,
        (name, (index, now)): (&Identity, (usize, i64)),
        file: &BlockFile,
        seen: &Seen,
    ) {
        let time = self.uses.note(name, index, now);
        if i128::from(now) - seen.changed > self.usage.marking_interval()
            && let Ok(fd) = file.raw().fd()
        {
            let _best_effort = mark_used_at(fd, time).or_else(|_| mark_used(fd));
        }
    }

    /// Has the file of a block that is stored say where in its prompt it stands.
    pub(super) fn mark_stored(&self, file: &BlockFile, stamp: u64) {
        if let Ok(fd) = file.raw().fd() {
            let _best_effort = mark_used_at(fd, self.uses.of(stamp, self.folder.now()));
        }
    }
}
