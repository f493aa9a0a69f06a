//! What is left of a reservation that ends without a commit.

use std::sync::Arc;

use kvdepot_arena::format::file_header::LEN;

use super::Opened;
use crate::tier::posix::folder::Folder;
use crate::tier::posix::name::room_of;
use crate::tier::posix::usage::Usage;

/// A file that is not published, and its bytes, which go back whatever becomes of it.
pub(super) struct Left {
    pub(super) folder: Arc<Folder>,
    pub(super) usage: Arc<Usage>,
    pub(super) opened: Opened,
}

impl Drop for Left {
    fn drop(&mut self) {
        let bytes = room_of(LEN as u64 + self.opened.place.len);
        self.usage.give_back(bytes, self.opened.epoch);
    }
}
