//! Room for a block as a value.

use std::ops::Deref;
use std::sync::Arc;

use crate::body::Arena;
use crate::place::{Place, Token};

/// Who takes reservations back.
pub trait TakesBack: Send + Sync {
    /// Ends a reservation that was not committed.
    fn take_back(&self, token: Token);
}

impl TakesBack for Arena {
    fn take_back(&self, token: Token) {
        self.abort(&[token]);
    }
}

/// Room for a block that nobody sees before it is committed. Whoever drops it gives it back, so
/// that no path that ends early leaves a key that is being written for ever.
///
/// Whoever joined it learns of its end from the pipeline's ledger alone: a call that lets others
/// see a reservation ends it there too.
#[must_use = "dropped, it is given back"]
pub struct Reserved {
    whose: Arc<dyn TakesBack>,
    place: Place,
    /// Whether it ends with the value.
    ours: bool,
}

impl Reserved {
    /// A reservation that `whose` has made.
    pub fn new(whose: Arc<dyn TakesBack>, place: Place) -> Reserved {
        Reserved {
            whose,
            place,
            ours: true,
        }
    }

    /// Another process writes there from now on, or has it to give back: the reservation ends by
    /// a commit or an abort of its token, or with that process, and not with this value.
    pub fn hand_out(&mut self) -> Place {
        self.ours = false;
        self.place
    }
}

impl Deref for Reserved {
    type Target = Place;

    fn deref(&self) -> &Place {
        &self.place
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if self.ours {
            self.whose.take_back(self.place.token);
        }
    }
}
