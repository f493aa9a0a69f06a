//! The parts of a shared amount that clients hold.
//!
//! A client may be stopped at any point, and keeps its part for as long as it is stopped. So a
//! client gets at most as much as stays free for all others together: half of the amount for one
//! client, a quarter more for a second one. The first request of a client needs only free room, so
//! that the largest request succeeds while the amount is unused. Several stopped clients with large
//! first requests may hold everything. This process has no limit of its own.

use std::collections::HashMap;

/// An amount of bytes, blocks or slots, and the parts of it that are in use.
pub(crate) struct Shares {
    most: u64,
    held: u64,
    /// By seat. Seat 0 is this process, which has no entry.
    clients: HashMap<u64, u64>,
}

impl Shares {
    /// Creates the shares of `most` units, all of them free.
    pub(crate) fn new(most: u64) -> Shares {
        Shares {
            most,
            held: 0,
            clients: HashMap::new(),
        }
    }

    /// Changes the number of units. Those in use stay in use.
    pub(crate) fn resize(&mut self, most: u64) {
        self.most = most;
    }

    /// Returns the number of units in use. More than all are after [`Shares::take`] without room.
    pub(crate) fn held(&self) -> u64 {
        self.held
    }

    /// Returns the number of units that are free.
    pub(crate) fn free(&self) -> u64 {
        self.most.saturating_sub(self.held)
    }

    /// Returns the number of units that a client holds.
    pub(crate) fn of(&self, seat: u64) -> u64 {
        self.clients.get(&seat).copied().unwrap_or(0)
    }

    /// Returns true if a client may have `count` more units.
    pub(crate) fn fits(&self, seat: u64, count: u64) -> bool {
        let (free, own) = (self.free(), self.of(seat));
        count <= free && (own == 0 || own + count <= free - count)
    }

    /// Takes units, free or not.
    pub(crate) fn take(&mut self, seat: u64, count: u64) {
        self.held += count;
        if seat > 0 {
            *self.clients.entry(seat).or_default() += count;
        }
    }

    /// Returns units.
    pub(crate) fn give_back(&mut self, seat: u64, count: u64) {
        self.held -= count;
        if let Some(own) = self.clients.get_mut(&seat) {
            *own -= count;
            if *own == 0 {
                self.clients.remove(&seat);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how many times 10 units fit for a client, all of which it takes.
    fn fill(shares: &mut Shares, seat: u64) -> u64 {
        let mut count = 0;
        while shares.fits(seat, 10) {
            shares.take(seat, 10);
            count += 1;
        }
        count
    }

    #[test]
    fn clients_never_hold_everything_and_this_process_may() {
        let mut shares = Shares::new(1200);
        assert_eq!([1, 2, 3].map(|seat| fill(&mut shares, seat)), [60, 30, 15]);
        assert!(!shares.fits(1, 10) && shares.fits(9, 10));
        assert_eq!(fill(&mut shares, 0), 15);
        for (seat, count) in [(1, 600), (2, 300), (3, 150)] {
            assert_eq!(shares.of(seat), count);
            shares.give_back(seat, count);
        }
        shares.give_back(0, 150);
        assert_eq!((shares.held(), shares.clients.len()), (0, 0));
        assert_eq!(fill(&mut shares, 2), 60);
    }

    #[test]
    fn the_largest_request_fits_while_everything_is_free() {
        let shares = Shares::new(1001);
        for seat in [0, 1] {
            assert!(shares.fits(seat, 1001));
            assert!(!shares.fits(seat, 1002));
        }
    }
}
