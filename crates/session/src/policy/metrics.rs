//! What was written, and what was not.

use super::answer::{Declined, Reason};

/// Of the saves of one reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Saves that succeeded.
    pub saved: u64,
    /// Saves that failed.
    pub failed: u64,
    /// Bytes that both wrote.
    pub bytes_written: u64,
}

/// Sums since the policy was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Metrics {
    /// Bytes that were written, those of failed saves too.
    pub bytes_written: u64,
    /// Bytes of the tokens that came to disk by it, without what is written whatever the length.
    pub bytes_new: u64,
    reasons: [Tally; Reason::ALL.len()],
    declined: [u64; Declined::ALL.len()],
}

impl Metrics {
    /// Bytes written over bytes of new tokens. `None` before there are any.
    #[must_use]
    pub fn write_amplification(&self) -> Option<f64> {
        (self.bytes_new > 0).then(|| self.bytes_written as f64 / self.bytes_new as f64)
    }

    /// Of the saves of one reason.
    #[must_use]
    pub fn of(&self, reason: Reason) -> Tally {
        self.reasons[reason as usize]
    }

    /// Checkpoints that were not taken. A continued one that waits for the budget counts once.
    #[must_use]
    pub fn declined(&self, why: Declined) -> u64 {
        self.declined[why as usize]
    }

    pub(super) fn save(&mut self, reason: Reason, written: u64, new: u64) {
        self.write(reason, written).saved += 1;
        self.bytes_new = self.bytes_new.saturating_add(new);
    }

    pub(super) fn fail(&mut self, reason: Reason, written: u64) {
        self.write(reason, written).failed += 1;
    }

    pub(super) fn decline(&mut self, why: Declined) {
        self.declined[why as usize] += 1;
    }

    fn write(&mut self, reason: Reason, bytes: u64) -> &mut Tally {
        self.bytes_written = self.bytes_written.saturating_add(bytes);
        let tally = &mut self.reasons[reason as usize];
        tally.bytes_written = tally.bytes_written.saturating_add(bytes);
        tally
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_amplification_counts_what_failed_saves_wrote() {
        let mut metrics = Metrics::default();
        assert_eq!(metrics.write_amplification(), None);
        metrics.save(Reason::Evict, 110, 100);
        metrics.fail(Reason::Evict, 90);
        assert_eq!(metrics.write_amplification(), Some(2.0));
        let evict = metrics.of(Reason::Evict);
        assert_eq!(
            (evict.saved, evict.failed, evict.bytes_written),
            (1, 1, 200)
        );
        assert_eq!(metrics.of(Reason::Cold), Tally::default());
    }
}
