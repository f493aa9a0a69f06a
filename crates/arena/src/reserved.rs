//! Room for a block as a value.

use std::ops::Deref;
use std::sync::Arc;

use crate::body::Arena;
use crate::place::{Place, Token};

/// An owner of reservations that can release them.
pub trait TakesBack: Send + Sync {
    /// Releases a reservation that was not committed.
    fn take_back(&self, token: Token);
}

impl TakesBack for Arena {
    fn take_back(&self, token: Token) {
        self.abort(&[token]);
    }
}

/// A reservation of space for a block, which is invisible before it is committed. Dropping the
/// value releases it.
///
/// So a code path that ends early cannot leave a key reserved forever. Calls that wait for this
/// block are notified only by the pipeline. Therefore a call that makes a reservation visible to
/// others must also end it there.
#[must_use = "dropped, it is given back"]
pub struct Reserved {
    whose: Arc<dyn TakesBack>,
    place: Place,
    /// Whether it ends with the value.
    ours: bool,
}

impl Reserved {
    /// Creates the value for a reservation at `place` that `whose` has made.
    pub fn new(whose: Arc<dyn TakesBack>, place: Place) -> Reserved {
        Reserved {
            whose,
            place,
            ours: true,
        }
    }

    /// Transfers the reservation to another process, and returns its location.
    ///
    /// From now on, a commit or an abort of the token, or the end of that process, ends the
    /// reservation. Dropping this value no longer releases it.
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
