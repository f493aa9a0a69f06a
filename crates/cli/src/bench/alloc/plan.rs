//! How much is done.

use crate::args::Alloc;

/// The counts of a run.
pub(super) struct Plan {
    /// Objects that are allocated and counted.
    pub(super) operations: usize,
    /// Of these, those of all threads together.
    pub(super) threaded: usize,
    pub(super) rounds: usize,
    /// Live extents of the rebuilt pool.
    pub(super) extents: usize,
    pub(super) quick: bool,
}

impl Plan {
    pub(super) fn new(args: &Alloc) -> Plan {
        let (operations, rounds) = if args.quick {
            (20_000, 1)
        } else {
            (1_000_000, 3)
        };
        let operations = args.operations.unwrap_or(operations);
        Plan {
            operations,
            threaded: operations * 2,
            rounds: args.rounds.unwrap_or(rounds),
            extents: operations,
            quick: args.quick,
        }
    }

    /// What each of several threads allocates.
    pub(super) fn each(&self, threads: usize) -> usize {
        self.threaded / threads
    }
}
