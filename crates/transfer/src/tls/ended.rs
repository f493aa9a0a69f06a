//! Why a protected connection has ended, for whoever has its inner end.

use std::sync::OnceLock;

/// Why.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// One side does not believe the other, or it speaks no TLS; another attempt is of no use.
    Refused(String),
    /// The connection went.
    Lost(String),
}

impl Failure {
    /// Why, for people.
    pub(crate) fn into_text(self) -> String {
        match self {
            Failure::Refused(why) | Failure::Lost(why) => why,
        }
    }
}

/// Why, once it has ended: known before the inner end is shut.
#[derive(Debug, Default)]
pub(crate) struct Ended(OnceLock<Failure>);

impl Ended {
    pub(super) fn note(&self, failure: Failure) {
        // It ends once.
        let _first = self.0.set(failure);
    }

    pub(crate) fn get(&self) -> Option<Failure> {
        self.0.get().cloned()
    }
}
