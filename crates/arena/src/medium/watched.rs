//! A medium that tells a test what is about to be written to it and synced.

use std::fmt;
use std::sync::Arc;

use kvdepot_media::{Buffer, Opened, Result};

use super::{Lock, Medium, Shared, Written};
use crate::format::record;

pub(crate) trait Watcher: Send + Sync {
    fn writes(&self, at: u64, bytes: &[u8]);

    fn syncs(&self, _ranges: &[(u64, u64)]) {}
}

pub(crate) struct Watched<W>(pub(crate) Shared, pub(crate) W);

impl<W> fmt::Debug for Watched<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<W: Watcher> Medium for Watched<W> {
    fn opened(&self) -> &Opened {
        self.0.opened()
    }

    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<()> {
        self.0.read_at(at, out)
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> Result<()> {
        self.1.writes(at, bytes);
        self.0.write_at(at, bytes)
    }

    fn sync(&self, ranges: &[(u64, u64)]) -> Vec<bool> {
        self.1.syncs(ranges);
        self.0.sync(ranges)
    }

    fn commit(&self, records: &[Written], durable: bool) -> Vec<bool> {
        let each = records.iter();
        each.for_each(|(at, bytes)| self.1.writes(*at, bytes));
        if durable {
            let range = |(at, _): &Written| (*at, record::LEN as u64);
            self.1.syncs(&records.iter().map(range).collect::<Vec<_>>());
        }
        self.0.commit(records, durable)
    }

    fn is_lost(&self, at: u64, len: u64) -> bool {
        self.0.is_lost(at, len)
    }

    fn lost(&self) -> Option<Vec<(u64, u64)>> {
        self.0.lost()
    }

    fn losses(&self) -> u64 {
        self.0.losses()
    }

    fn lock_writes(&self, lock: Lock) {
        self.0.lock_writes(lock);
    }

    fn unlock_writes(&self) {
        self.0.unlock_writes();
    }

    fn grown(&self, len: u64) -> Result<Arc<dyn Medium>> {
        self.0.grown(len)
    }

    fn buffer(&self, at: u64, len: u64) -> Result<Buffer> {
        self.0.buffer(at, len)
    }
}
