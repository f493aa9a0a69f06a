//! What this process has removed, found rotten or evicted: told to the filter, counted, and noted
//! for who asks what has gone. What others remove, nobody here knows of.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvdepot_arena::format::file_header::LEN;
use kvdepot_arena::{Departed, Identity};

use super::folder::Folder;
use crate::tier::departures::Departures;
use crate::tier::filter::Filter;

/// Why a block has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// There was no room.
    Evicted,
    /// It was not what its name says.
    Rotten,
    /// Somebody wanted it.
    Removed,
}

pub(super) struct Losses {
    filter: Arc<Filter<()>>,
    /// Files, and what they took.
    evicted: [AtomicU64; 2],
    rotten: AtomicU64,
    departures: Departures,
}

impl Losses {
    pub(super) fn new(filter: &Arc<Filter<()>>) -> Losses {
        Losses {
            filter: Arc::clone(filter),
            evicted: Default::default(),
            rotten: AtomicU64::new(0),
            departures: Departures::default(),
        }
    }

    /// The length of a block's payload, while its file is there and if anybody wants to know.
    pub(super) fn len_of(&self, folder: &Folder, name: &Identity) -> Option<u64> {
        let wanted = self.departures.are_wanted();
        wanted.then(|| folder.header(name))?.map(|at| at.len)
    }

    /// Notes that a block's file is gone, which took so many bytes, and had a payload of these.
    pub(super) fn went(&self, name: &Identity, why: Why, room: u64, len: Option<u64>) {
        self.filter.note(*name, None);
        match why {
            Why::Evicted => {
                self.evicted[0].fetch_add(1, Ordering::Relaxed);
                self.evicted[1].fetch_add(room, Ordering::Relaxed);
            }
            Why::Rotten => {
                self.rotten.fetch_add(1, Ordering::Relaxed);
            }
            Why::Removed => {}
        }
        let len = len.unwrap_or_else(|| room.saturating_sub(LEN as u64));
        self.departures.note(name, len);
    }

    /// Blocks and bytes that were evicted, and blocks that did not verify.
    pub(super) fn counts(&self) -> ((u64, u64), u64) {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let [blocks, bytes] = &self.evicted;
        ((read(blocks), read(bytes)), read(&self.rotten))
    }

    /// What has gone since this listener asked last.
    pub(super) fn departed(&self, listener: u64, limit: usize) -> Departed {
        self.departures.since(listener, limit)
    }

    pub(super) fn forget(&self, listener: u64) {
        self.departures.forget(listener);
    }
}
