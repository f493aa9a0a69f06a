//! What the medium has lost under an open arena is no room: neither free, nor a place for a hole.

use std::sync::atomic::Ordering;

use kvdepot_alloc::{Extent, Pool};

use super::{Arena, State};
use crate::format::GRANULE;
use crate::format::record::LEN;

impl Arena {
    /// Notes an extent that is not used again.
    pub(super) fn lose(&self, state: &mut State, offset: u64, len: u64) {
        state.lost.push((offset, len));
        self.counters.lost_bytes.fetch_add(len, Ordering::Relaxed);
        let path = self.path().map(|path| path.display().to_string());
        tracing::error!(
            tier = self.name,
            path,
            offset,
            len,
            "the medium failed; these bytes are not used again while the arena is open"
        );
    }

    /// Takes what the medium has lost since the last time out of what is free.
    pub(super) fn carve_lost(&self, state: &mut State) {
        let mapping = self.mapping.load();
        let losses = mapping.losses();
        if losses == state.losses {
            return;
        }
        // While a loss is being noted, the next call looks.
        let Some(ranges) = mapping.lost() else { return };
        let data = self.layout().data;
        let mut pieces: Vec<Extent> = Vec::new();
        for free in state.pool.free_extents() {
            let (begin, end) = (data + free.offset, data + free.end());
            for (at, len) in &ranges {
                let from = (at / GRANULE * GRANULE).max(begin);
                let to = (at + len).next_multiple_of(GRANULE).min(end);
                if from < to {
                    pieces.push(Extent {
                        offset: from - data,
                        len: to - from,
                    });
                }
            }
        }
        pieces.sort_unstable_by_key(|piece| piece.offset);
        let mut apart: Vec<Extent> = Vec::new();
        for piece in pieces {
            match apart.last_mut() {
                Some(last) if piece.offset < last.end() => {
                    last.len = last.len.max(piece.end() - last.offset);
                }
                _ => apart.push(piece),
            }
        }
        if !apart.is_empty() {
            let taken = state.pool.live_extents().chain(apart.iter().copied());
            match Pool::rebuild(state.pool.size(), GRANULE, taken.collect::<Vec<_>>()) {
                Ok(pool) => state.pool = pool,
                Err(error) => {
                    tracing::error!(tier = self.name, %error, "lost bytes could not be set apart");
                    return;
                }
            }
            for piece in apart {
                self.lose(state, data + piece.offset, piece.len);
            }
        }
        state.losses = losses;
    }

    /// A slot whose record the medium keeps. Others are not used again while the arena is open.
    pub(super) fn take_slot(&self, state: &mut State) -> Option<u32> {
        while let Some(slot) = state.entries.take() {
            if self.table.is_none() || !self.is_lost(self.layout().record(slot), LEN as u64) {
                return Some(slot);
            }
        }
        None
    }
}
