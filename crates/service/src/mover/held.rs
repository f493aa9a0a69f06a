//! The media whose room no later owner gives to other blocks while they are mapped here: those
//! whose descriptors came with the writers' lock, or have got it since.

use std::collections::HashSet;
use std::path::Path;

use kvdepot_host::fork::LockFd;
use parking_lot::Mutex;

use crate::frame::hello::{Medium, Role};
use crate::mover::attach::{PATIENCE, shake_hands};

/// Their numbers.
#[derive(Default)]
pub(crate) struct Held(Mutex<HashSet<u32>>);

impl Held {
    /// Notes what a welcome says.
    pub(crate) fn learn(&self, media: &[(Medium, LockFd)]) {
        let held = media.iter().filter(|(medium, _)| medium.held);
        self.0.lock().extend(held.map(|(medium, _)| medium.number));
    }

    /// Whether a medium is among them. Where it was not, the owner of that session is asked again:
    /// it may have its medium to itself by now.
    pub(crate) fn has(&self, number: u32, at: &Path, session: u64) -> bool {
        if self.0.lock().contains(&number) {
            return true;
        }
        // A reader is told the same as a writer, and leaves nothing behind at the owner.
        match shake_hands(at, Role::Read, PATIENCE) {
            Ok((_, welcome)) if welcome.terms.session == session => self.learn(&welcome.media),
            _ => return false,
        }
        self.0.lock().contains(&number)
    }
}
