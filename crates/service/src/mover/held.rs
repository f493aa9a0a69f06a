//! The media whose room no later owner gives to other blocks while they are mapped here: those
//! whose descriptors came with the writers' lock, or have got it since.

use std::collections::HashSet;
use std::path::Path;
use std::time::{Duration, Instant};

use kvdepot_arena::clock;
use kvdepot_host::fork::LockFd;
use parking_lot::Mutex;

use crate::frame::hello::{Kind, Medium, Role};
use crate::mover::attach::{PATIENCE, shake_hands};

/// How long an owner that has not answered is not asked again: a call names many blocks.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(crate) struct Held {
    /// Their numbers.
    media: Mutex<HashSet<u32>>,
    /// When the owner did not answer.
    unanswered: Mutex<Option<Instant>>,
}

impl Held {
    /// Notes what a welcome says.
    pub(crate) fn learn(&self, media: &[(Medium, LockFd)]) {
        // A door has the number of its tier's arena.
        let held = media
            .iter()
            .filter(|(medium, _)| medium.held && medium.kind != Kind::Door);
        self.media
            .lock()
            .extend(held.map(|(medium, _)| medium.number));
    }

    /// Whether a medium is among them. Where it was not, the owner of that session is asked again:
    /// it may have its medium to itself by now.
    pub(crate) fn has(&self, number: u32, at: &Path, session: u64) -> bool {
        if self.media.lock().contains(&number) {
            return true;
        }
        let mut unanswered = self.unanswered.lock();
        if unanswered.is_some_and(|at| clock::now() < at + PAUSE) {
            return false;
        }
        // A reader is told the same as a writer, and leaves nothing behind at the owner.
        match shake_hands(at, Role::Read, PATIENCE) {
            Ok((_, welcome)) if welcome.terms.session == session => self.learn(&welcome.media),
            Ok(_) => return false,
            Err(_) => {
                *unanswered = Some(clock::now());
                return false;
            }
        }
        self.media.lock().contains(&number)
    }
}
