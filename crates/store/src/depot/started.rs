//! A depot that is open, and may turn out not to be wanted any more.

use super::Depot;

/// A depot that has just been opened.
///
/// Dropping the value closes the depot and removes new arenas, as after a failed start. So no
/// unused arena remains.
#[must_use = "what was made for it is removed again unless it is kept"]
pub struct Started(pub(super) Depot);

impl Started {
    /// Returns the depot, and makes its arenas permanent.
    #[must_use]
    pub fn keep(self) -> Depot {
        self.0.verbs.keep();
        self.0
    }
}
