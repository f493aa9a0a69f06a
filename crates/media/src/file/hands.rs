//! Who reads and writes files.

use super::job::Job;
use super::ring::Ring;
use super::threads::Threads;
use super::usrbio::{Usrbio, UsrbioConfig};
use crate::error::Result;
use crate::simulated::is_simulated;
use std::sync::Arc;
use std::time::Duration;

/// The I/O engine for files: an io_uring ring for files that bypass the page cache, and threads for
/// all others.
///
/// For buffered files, a ring would copy the bytes in the submitting thread. If this process cannot
/// create a ring, as in most containers, threads do everything.
#[derive(Debug)]
pub struct Hands {
    who: Who,
    /// Why there is no ring.
    refused: Option<String>,
    patience: Option<Duration>,
}

#[derive(Debug)]
enum Who {
    /// This host's kernel.
    Here {
        ring: Option<Ring>,
        threads: Arc<Threads>,
    },
    /// A 3FS.
    Usrbio(Arc<Usrbio>),
}

impl Hands {
    /// Creates an engine with a ring, if the kernel provides one, and `threads` threads. A
    /// simulation has no ring.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) for 0 or more than 256 threads,
    /// [`Error::Io`](crate::Error::Io) if a thread cannot be started.
    pub fn new(threads: usize) -> Result<Arc<Self>> {
        let threads = Threads::new(threads)?;
        let (ring, refused) = match is_simulated() {
            true => (None, None),
            false => match Ring::new(&threads) {
                Ok(ring) => (Some(ring), None),
                Err(error) => (None, Some(error.to_string())),
            },
        };
        Ok(Arc::new(Self {
            who: Who::Here { ring, threads },
            refused,
            patience: None,
        }))
    }

    /// Creates an engine with `count` threads and without a ring.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) for 0 or more than 256 threads,
    /// [`Error::Io`](crate::Error::Io) if a thread cannot be started.
    pub fn threads(count: usize) -> Result<Arc<Self>> {
        Self::waited(count, None)
    }

    /// Creates an engine with `count` threads and without a ring, for a file system that may hang.
    ///
    /// With a ring, some file systems block the submitting thread. Requests that take longer than
    /// `patience` fail ([`Carrier::patience`](crate::Carrier::patience)).
    ///
    /// # Errors
    ///
    /// The errors of [`Hands::threads`].
    pub fn patient(count: usize, patience: Duration) -> Result<Arc<Self>> {
        Self::waited(count, Some(patience))
    }

    fn waited(count: usize, patience: Option<Duration>) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            who: Who::Here {
                ring: None,
                threads: Threads::new(count)?,
            },
            refused: None,
            patience,
        }))
    }

    /// Creates an engine with the USRBIO rings of a 3FS, for files below its mount.
    ///
    /// All bytes of these files use the staging buffer, and requests that take longer than
    /// `config.patience` fail. Threads make the calls to the mount itself. Staging buffers that are
    /// allocated from now on are registered with 3FS, which then needs no copy of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) if the library cannot be loaded (with the loader's message),
    /// if the path is not on a 3FS, or if 3FS provides no rings for this process.
    /// [`Error::Invalid`](crate::Error::Invalid) for a number outside its bounds.
    pub fn usrbio(config: &UsrbioConfig) -> Result<Arc<Self>> {
        let usrbio = Usrbio::open(config)?;
        Ok(Arc::new(Self {
            patience: Some(usrbio.patience()),
            who: Who::Usrbio(usrbio),
            refused: None,
        }))
    }

    /// Returns the number of requests that needed an additional copy to or from a 3FS, because the
    /// staging buffer is not registered with it.
    #[must_use]
    pub fn bounced(&self) -> u64 {
        self.of_3fs().map_or(0, |usrbio| usrbio.bounced())
    }

    pub(super) fn of_3fs(&self) -> Option<&Arc<Usrbio>> {
        match &self.who {
            Who::Here { .. } => None,
            Who::Usrbio(usrbio) => Some(usrbio),
        }
    }

    /// Returns the reason for which there is no ring, or `None` if there is one or none was
    /// requested.
    #[must_use]
    pub fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    /// Returns a description of the I/O method, for the log. `direct` is true for files that bypass
    /// the page cache.
    #[must_use]
    pub fn way(&self, direct: bool) -> String {
        match (direct, self.refused()) {
            (true, None) => "direct I/O with io_uring".to_owned(),
            (true, Some(why)) => format!("direct I/O with threads ({why})"),
            (false, _) => "page cache with threads".to_owned(),
        }
    }

    /// How long what they are asked for is waited for.
    pub(super) fn patience(&self) -> Option<Duration> {
        self.patience
    }

    /// Has jobs done that are all of `direct` files, or all of others.
    pub(super) fn push(&self, direct: bool, jobs: impl ExactSizeIterator<Item = Job>) {
        match &self.who {
            Who::Here {
                ring: Some(ring), ..
            } if direct => ring.push(jobs),
            Who::Here { threads, .. } => threads.push(jobs),
            Who::Usrbio(usrbio) => usrbio.push(jobs),
        }
    }
}
