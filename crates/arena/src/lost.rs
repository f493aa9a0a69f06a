//! What the medium has lost under an open arena is no room: neither free, nor a place for a hole.

use std::sync::atomic::Ordering;

use kvdepot_alloc::Extent;

use crate::body::{Arena, State};
use crate::format::GRANULE;
use crate::format::record::LEN;
use crate::held::{Guard, turn_len};
use crate::index::STEP;

impl Arena {
    /// Notes an extent that is not used again.
    pub(crate) fn lose(&self, state: &mut State, offset: u64, len: u64) {
        state.lost.push((offset, len));
        self.counters.lost_bytes.fetch_add(len, Ordering::Relaxed);
        let path = self.path().map(|path| path.display().to_string());
        tracing::error!(
            tier = self.name,
            path,
            offset,
            len,
            "medium error in a range of the arena; the range's blocks are lost, and the range \
             stays unused until the next open"
        );
    }

    /// What the medium has lost, looked at in turns: nothing of it ever comes back.
    pub(crate) fn lost(&self, state: &mut Guard<'_, State>) -> Vec<(u64, u64)> {
        let mut lost = Vec::new();
        while lost.len() < state.lost.len() {
            state.take_turns(lost.len());
            let rest = &state.lost[lost.len()..];
            lost.extend_from_slice(&rest[..rest.len().min(turn_len())]);
        }
        lost
    }

    /// Takes what the medium has lost since the last time out of what is free, some extents at each
    /// call. What is missed is found when it is allocated.
    pub(crate) fn carve_lost(&self, state: &mut State) {
        let medium = self.medium.load();
        let losses = medium.losses();
        if losses == state.losses {
            return;
        }
        // While a loss is being noted, the next call looks.
        let Some(ranges) = medium.lost() else { return };
        let data = self.layout().data;
        let ranges = granules(ranges);
        let mut parts: Vec<Extent> = Vec::new();
        let (known, from) = state.carving.take().unwrap_or((losses, 0));
        let next = state.pool.carve(from, STEP, |free| {
            let (begin, end) = (data + free.offset, data + free.end());
            let first = ranges.partition_point(|(_, behind)| *behind <= begin);
            let (at, behind) = ranges.get(first)?;
            let (from, to) = (begin.max(*at), end.min(*behind));
            let part = (from < to).then(|| Extent {
                offset: from - data,
                len: to - from,
            });
            parts.extend(part);
            part
        });
        match next {
            Some(from) => state.carving = Some((known, from)),
            None => state.losses = known,
        }
        for part in parts {
            self.lose(state, data + part.offset, part.len);
        }
    }

    /// A record that the medium keeps. Others are not used again while the arena is open.
    pub(crate) fn take_record(&self, state: &mut State) -> Option<u32> {
        loop {
            let record = state.records.take()?;
            if self.keeps_record(record) {
                return Some(record);
            }
        }
    }

    /// Whether the medium has not failed under a record.
    pub(crate) fn keeps_record(&self, record: u32) -> bool {
        self.table.is_none() || !self.is_lost(self.layout().record(record), LEN as u64)
    }
}

/// Ranges as (begin, end) of whole granules, in order and apart.
fn granules(mut ranges: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    ranges.sort_unstable();
    let mut apart: Vec<(u64, u64)> = Vec::new();
    for (at, len) in ranges {
        let begin = at / GRANULE * GRANULE;
        let end = (at + len).next_multiple_of(GRANULE);
        match apart.last_mut() {
            Some((_, behind)) if begin <= *behind => *behind = end.max(*behind),
            _ => apart.push((begin, end)),
        }
    }
    apart
}
