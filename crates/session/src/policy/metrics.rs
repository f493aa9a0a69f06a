//! What was written, and what was not.

use super::answer::{Declined, Reason};

/// Sums of the saves of one reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Number of successful saves.
    pub saved: u64,
    /// Number of failed saves.
    pub failed: u64,
    /// Bytes that successful and failed saves wrote.
    pub bytes_written: u64,
}

/// Sums since the policy was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Metrics {
    /// Bytes written by all saves, including failed ones.
    pub bytes_written: u64,
    /// Bytes of the tokens that successful saves added, without the fixed bytes of each checkpoint.
    pub bytes_new: u64,
    reasons: [Tally; Reason::ALL.len()],
    declined: [u64; Declined::ALL.len()],
}

impl Metrics {
    /// Returns the ratio of bytes written to bytes of new tokens, or `None` before there are new
    /// tokens.
    #[must_use]
    pub fn write_amplification(&self) -> Option<f64> {
        (self.bytes_new > 0).then(|| self.bytes_written as f64 / self.bytes_new as f64)
    }

    /// Returns the sums of the saves of one reason.
    #[must_use]
    pub fn of(&self, reason: Reason) -> Tally {
        self.reasons[reason as usize]
    }

    /// Returns the number of checkpoints that were declined for this reason. A continued checkpoint
    /// that waits for the budget counts once.
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
