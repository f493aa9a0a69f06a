//! A medium that is mapped: it is read and written like memory, because it is.

use std::sync::Arc;

use kvdepot_media::{Buffer, Flush, Mapping, Opened, Result};

use super::{Medium, Written};
use crate::format::record;

/// Ranges that lie closer than this are synced as one: less than a page, and few cache lines.
const GAP: u64 = 4096;

impl Medium for Arc<Mapping> {
    fn opened(&self) -> &Opened {
        Mapping::opened(self)
    }

    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<()> {
        self.read_into(at, out)
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> Result<()> {
        self.write_from(at, bytes)
    }

    fn sync(&self, ranges: &[(u64, u64)]) -> Vec<bool> {
        let sync = |(at, len): &(u64, u64)| {
            let synced = Mapping::sync(self, *at, *len, Flush::Power);
            if let Err(error) = &synced {
                tracing::error!(at, len, %error,
                    "cannot sync the arena's file or device; blocks just written count as not stored");
            }
            synced.is_ok()
        };
        match merged(ranges).iter().all(sync) {
            true => vec![true; ranges.len()],
            // Which of them it was.
            false => ranges.iter().map(sync).collect(),
        }
    }

    fn commit(&self, records: &[Written], durable: bool) -> Vec<bool> {
        for (at, bytes) in records {
            // Inside the table by construction: no number is above the layout's.
            if let Err(error) = self.write_from(*at, bytes) {
                tracing::error!(at, %error,
                    "cannot write the record of a block; the block counts as not stored");
            }
        }
        let has = |(at, _): &Written| !self.is_lost(*at, record::LEN as u64);
        if !durable {
            return records.iter().map(has).collect();
        }
        let place = |(at, _): &Written| (*at, record::LEN as u64);
        let places: Vec<(u64, u64)> = records.iter().map(place).collect();
        let synced = Medium::sync(self, &places).into_iter();
        let each = synced.zip(records);
        each.map(|(synced, record)| synced && has(record)).collect()
    }

    fn is_lost(&self, at: u64, len: u64) -> bool {
        Mapping::is_lost(self, at, len).unwrap_or(true)
    }

    fn lost(&self) -> Option<Vec<(u64, u64)>> {
        Mapping::lost(self)
    }

    fn losses(&self) -> u64 {
        Mapping::losses(self)
    }

    fn grown(&self, len: u64) -> Result<Arc<dyn Medium>> {
        Ok(Arc::new(Mapping::grown(self, len)?))
    }

    fn expect(&self, at: u64, len: u64) -> Result<()> {
        self.populate_read(at, len)
    }

    fn buffer(&self, at: u64, len: u64) -> Result<Buffer> {
        Mapping::buffer(self, at, len)
    }

    fn mapping(&self) -> Option<&Arc<Mapping>> {
        Some(self)
    }
}

/// The ranges in order, those that lie together as one.
fn merged(ranges: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut sorted = ranges.to_vec();
    sorted.sort_unstable();
    let mut whole: Vec<(u64, u64)> = Vec::new();
    for (at, len) in sorted {
        match whole.last_mut() {
            Some((begin, room)) if at <= *begin + *room + GAP => {
                *room = (*room).max(at + len - *begin);
            }
            _ => whole.push((at, len)),
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_lie_together_are_synced_as_one() {
        let page = GAP;
        assert_eq!(merged(&[]), []);
        let ranges = [(9 * page, 128), (128, 128), (0, 128), (page, 128)];
        assert_eq!(merged(&ranges), [(0, page + 128), (9 * page, 128)]);
        assert_eq!(merged(&[(0, 4 * page), (page, 128)]), [(0, 4 * page)]);
    }
}
