//! Where in a region the bytes of a leg lie: runs, each of which is one carry.

use crate::carrier::Alignment;

/// Where a run begins in a region, unless its carrier asks for more: what devices copy fastest
/// from.
const STEP: u64 = 256;

/// A part of a region, and the runs that are laid out in it.
#[derive(Debug, Default)]
pub(super) struct Area {
    /// Where it begins in the region, and its length; both are multiples of 4096.
    begin: u64,
    len: u64,
    /// Positions and lengths at the carrier's end are multiples of this; a divisor of 4096.
    at: u64,
    runs: Vec<Run>,
}

/// Bytes that lie one after the other at the carrier's end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// Where they are at the carrier's end.
    pub(super) at: u64,
    /// Where they are in this process: the region's byte with this number, or an address.
    pub(super) place: u64,
    pub(super) len: u64,
    /// The first and the last unit that has bytes of it.
    pub(super) units: (u32, u32),
}

impl Area {
    pub(super) fn new(begin: u64, len: u64, alignment: Alignment) -> Self {
        Self {
            begin,
            len,
            at: alignment.at,
            runs: Vec::new(),
        }
    }

    pub(super) fn runs(&self) -> &[Run] {
        &self.runs
    }

    pub(super) fn clear(&mut self) {
        self.runs.clear();
    }

    /// How many of the bytes from position `at` on have room. What it cuts ends at a multiple of
    /// the alignment.
    pub(super) fn room(&self, at: u64) -> u64 {
        let (place, _) = self.place(at);
        (self.begin + self.len).saturating_sub(place)
    }

    /// Takes room for `len` bytes of `unit` from position `at` on; where in the region they lie.
    pub(super) fn add(&mut self, at: u64, len: u64, unit: u32) -> u64 {
        let (place, goes_on) = self.place(at);
        match self.runs.last_mut() {
            Some(run) if goes_on => {
                run.len += len;
                run.units.1 = unit;
            }
            _ => self.runs.push(Run {
                at,
                place,
                len,
                units: (unit, unit),
            }),
        }
        place
    }

    /// Notes bytes of `unit` that lie elsewhere in this process, at address `place`.
    pub(super) fn lie(&mut self, at: u64, place: u64, len: u64, unit: u32) {
        let units = (unit, unit);
        self.runs.push(Run {
            at,
            place,
            len,
            units,
        });
    }

    /// Where the bytes from `at` on would lie, and whether they go on with the last run. A run is
    /// as far from a multiple of the alignment in the region as it is at the carrier's end.
    fn place(&self, at: u64) -> (u64, bool) {
        let Some(last) = self.runs.last() else {
            return (self.begin + at % self.at, false);
        };
        let end = last.place + last.len;
        if last.at + last.len == at {
            return (end, true);
        }
        let begin = end.next_multiple_of(self.at.max(STEP));
        (begin + at % self.at, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn area(len: u64, at: u64) -> Area {
        let alignment = Alignment { at, memory: None };
        Area::new(8192, len, alignment)
    }

    #[test]
    fn neighbours_are_one_run_and_others_begin_aligned() {
        let mut area = area(16384, 512);
        assert_eq!(area.add(1000, 100, 0), 8192 + 488);
        assert_eq!(area.add(1100, 50, 1), 8192 + 588);
        assert_eq!(area.add(4096, 10, 2), 8192 + 1024);
        let runs = area.runs();
        assert_eq!(runs.len(), 2);
        assert_eq!((runs[0].len, runs[0].units), (150, (0, 1)));
        area.clear();
        assert_eq!(area.room(512), 16384);
    }

    #[test]
    fn what_is_cut_ends_at_a_multiple_of_the_alignment() {
        let mut area = area(8192, 4096);
        let room = area.room(4096 + 7);
        assert_eq!(room, 8192 - 7);
        area.add(4096 + 7, room, 0);
        assert_eq!(area.room(4096 + 8192), 0, "full");
        assert_eq!(area.room(1 << 30), 0);
    }
}
