//! A pin of which nobody has been told yet.

use std::sync::Arc;

use kvdepot_arena::Place;

use super::open::Open;

/// A pinned block; dropped, it is pinned no more.
pub(super) struct Pinned {
    open: Arc<Open>,
    place: Option<Place>,
}

impl Pinned {
    pub(super) fn new(open: &Arc<Open>, place: Place) -> Pinned {
        Pinned {
            open: Arc::clone(open),
            place: Some(place),
        }
    }

    /// Whoever is told of it ends the pin.
    pub(super) fn hand_out(mut self) -> Option<Place> {
        self.place.take()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(place) = self.place.take() {
            self.open.unpin(&[place]);
        }
    }
}
