//! A depot that is open, and may turn out not to be wanted any more.

use super::Depot;

/// A depot that has just been opened. Dropped instead of kept it is closed, and what was made for
/// it goes with it, as after a start that failed: nobody finds an arena that was never used.
#[must_use = "what was made for it is removed again unless it is kept"]
pub struct Started(pub(super) Depot);

impl Started {
    /// The depot. What was made for it stays, whatever happens.
    #[must_use]
    pub fn keep(self) -> Depot {
        self.0.verbs.keep();
        self.0
    }
}
