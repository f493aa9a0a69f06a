//! Disk space of a session file that is being written.

use std::ops::RangeInclusive;

use super::SessionWriter;
use crate::error::Error;

/// Initial size of a file of unknown length, and the largest step by which it grows.
const GROW: (u64, u64) = (64 << 20, 1 << 30);

impl SessionWriter {
    /// The file is that long now, or longer.
    pub(super) fn grow(&mut self, end: u64) -> Result<(), Error> {
        if end <= self.allocated {
            return Ok(());
        }
        let (first, most) = GROW;
        let more = self.allocated.clamp(first, most);
        // Exactly what there is to come is known where it was predicted.
        let most = match self.predicted {
            Some(_) => end,
            None => end.saturating_add(more),
        };
        self.reserve(end..=most)
    }

    /// Space up to one of these ends: the last, or the first where there is no more.
    pub(super) fn reserve(&mut self, ends: RangeInclusive<u64>) -> Result<(), Error> {
        let (least, mut end) = ends.into_inner();
        let more = |end: u64| end.saturating_sub(self.allocated);
        let wanted = more(least)..=more(end);
        let room = self.room.as_mut();
        let until_it_is_seen = room.map(|room| room(Some(wanted))).transpose()?;
        if let Some((given, _)) = &until_it_is_seen {
            end = self.allocated.saturating_add(*given);
        }
        if let Some(temporary) = &self.temporary {
            let allocated = match temporary.allocate(end) {
                Err(_) if least < end => {
                    end = least;
                    temporary.allocate(end)
                }
                allocated => allocated,
            };
            if !allocated? && until_it_is_seen.is_some() {
                temporary.set_len(end)?;
            }
        }
        self.allocated = self.allocated.max(end);
        Ok(())
    }
}
