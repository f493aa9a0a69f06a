//! A pollable event: a descriptor that becomes readable after a signal.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, retry_on_intr};

use super::{Error, Result};

/// A flag that programs can poll: readable from [`Event::signal`] to [`Event::clear`].
#[derive(Debug)]
pub struct Event {
    fd: OwnedFd,
}

impl Event {
    /// Creates an event that is not signaled.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if the process has no free descriptor.
    pub fn new() -> Result<Event> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let fd = eventfd(0, flags).map_err(Error::os("create an event descriptor"))?;
        Ok(Event { fd })
    }

    /// Returns the descriptor to poll.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.fd.as_fd().as_raw_fd()
    }

    /// Makes the descriptor readable until the event is cleared.
    pub fn signal(&self) {
        // A full counter (EAGAIN) is readable too, and nothing else can be refused.
        let written = retry_on_intr(|| rustix::io::write(&self.fd, &1u64.to_le_bytes()));
        debug_assert!(matches!(written, Ok(8) | Err(Errno::AGAIN)));
    }

    /// Makes the descriptor unreadable until the next signal.
    pub fn clear(&self) {
        let read = retry_on_intr(|| rustix::io::read(&self.fd, &mut [0; 8]));
        debug_assert!(matches!(read, Ok(8) | Err(Errno::AGAIN)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn readable(event: &Event) -> bool {
        let mut fds = [PollFd::new(&event.fd, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
    }

    #[test]
    fn it_is_readable_from_a_signal_until_it_is_cleared() {
        let event = Event::new().unwrap();
        assert!(!readable(&event));
        event.signal();
        event.signal();
        assert!(readable(&event));
        event.clear();
        assert!(!readable(&event));
        event.clear();
    }
}
