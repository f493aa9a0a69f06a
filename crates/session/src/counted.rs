//! Restores that were counted, and are not written yet (`usage`).

use std::collections::HashMap;

use crate::index::Id;

/// What this process has counted.
#[derive(Default)]
pub(crate) struct Counted {
    pub(crate) sessions: HashMap<Id, Pending>,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Pending {
    pub(crate) hits: u64,
    pub(crate) used: u64,
    /// When it was last written.
    pub(crate) written: u64,
}
