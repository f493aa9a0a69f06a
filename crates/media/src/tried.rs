//! What is made when it is first needed, and is tried again where it was refused: what the system
//! lacks, as room in a folder, it may have a moment later.

use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long a refusal holds: each try asks the system, or a daemon that may take its time.
pub(crate) const PAUSE: Duration = Duration::from_secs(1);

/// Something that is made once.
#[derive(Debug)]
pub(crate) struct Tried<T, E> {
    made: OnceLock<T>,
    /// When it was refused last, and why. Held by who makes it.
    refused: Mutex<Option<(Instant, E)>>,
}

impl<T, E: Clone> Tried<T, E> {
    pub(crate) const fn new() -> Self {
        Self {
            made: OnceLock::new(),
            refused: Mutex::new(None),
        }
    }

    /// It, if it is made; never waits.
    pub(crate) fn get(&self) -> Option<&T> {
        self.made.get()
    }

    /// It, which is made now if it is not and was not refused just before. Waits for who makes it.
    ///
    /// # Errors
    ///
    /// Those of `make`.
    pub(crate) fn get_or_make(&self, make: impl FnOnce() -> Result<T, E>) -> Result<&T, E> {
        if let Some(made) = self.made.get() {
            return Ok(made);
        }
        // One whose maker has panicked is not made.
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(made) = self.made.get() {
            return Ok(made);
        }
        if let Some((when, error)) = &*refused
            && when.elapsed() < PAUSE
        {
            return Err(error.clone());
        }
        match make() {
            Ok(made) => Ok(self.made.get_or_init(|| made)),
            Err(error) => {
                *refused = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_holds_for_a_pause_and_what_is_made_for_ever() {
        let tried = Tried::new();
        assert_eq!(tried.get_or_make(|| Err::<u8, _>("full")), Err("full"));
        assert_eq!(tried.get_or_make(|| Ok(1)), Err("full"));
        assert_eq!(tried.get(), None);
        std::thread::sleep(PAUSE);
        assert_eq!(tried.get_or_make(|| Err("still")), Err("still"));
        std::thread::sleep(PAUSE);
        assert_eq!(tried.get_or_make(|| Ok(2)), Ok(&2));
        assert_eq!(tried.get_or_make(|| Err("gone")), Ok(&2));
        assert_eq!(tried.get(), Some(&2));
    }
}
