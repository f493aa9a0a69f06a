//! Who reads and writes files.

use super::job::Job;
use super::ring::Ring;
use super::threads::Threads;
use super::usrbio::{Usrbio, UsrbioConfig};
use crate::error::Result;
use crate::simulated::is_simulated;
use std::sync::Arc;
use std::time::Duration;

/// A ring of the kernel for files that bypass its page cache, and threads for the others: of these
/// the kernel would copy the bytes in the thread that asks. Where it has no ring for this process,
/// as in most containers, threads do everything.
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
    /// A ring, where there is one, and `threads` threads. A simulation has no ring.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) for no thread or more than 256,
    /// [`Error::Io`](crate::Error::Io) when one cannot be started.
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

    /// Threads alone.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) for no thread or more than 256,
    /// [`Error::Io`](crate::Error::Io) when one cannot be started.
    pub fn threads(count: usize) -> Result<Arc<Self>> {
        Self::waited(count, None)
    }

    /// Threads alone, for a file system that may hang: some keep who asks by a ring waiting in the
    /// call itself. What is not answered within `patience` fails
    /// ([`Carrier::patience`](crate::Carrier::patience)).
    ///
    /// # Errors
    ///
    /// As [`Hands::threads`].
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

    /// The rings of a 3FS, for files below its mount. All bytes of them go through the slab, and
    /// what is not answered within `patience` fails; the mount itself is asked by threads. Slabs
    /// that are made from now on are told to 3FS, which so needs no copy of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) when the library cannot be loaded (it says what the loader
    /// said), the path is on no 3FS, or that has no rings for this process;
    /// [`Error::Invalid`](crate::Error::Invalid) for a number out of its bounds.
    pub fn usrbio(config: &UsrbioConfig) -> Result<Arc<Self>> {
        let usrbio = Usrbio::open(config)?;
        Ok(Arc::new(Self {
            patience: Some(usrbio.patience()),
            who: Who::Usrbio(usrbio),
            refused: None,
        }))
    }

    /// How many receipts were copied once more on their way to or from a 3FS, because it does not
    /// know the slab.
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

    /// Why the kernel has no ring for this process; `None` where it has, or nobody asked for one.
    #[must_use]
    pub fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    /// How files are read and written, in words: past the page cache or not.
    #[must_use]
    pub fn way(&self, direct: bool) -> String {
        match (direct, self.refused()) {
            (true, None) => "direct I/O by io_uring".to_owned(),
            (true, Some(why)) => format!("direct I/O by threads ({why})"),
            (false, _) => "the page cache, by threads".to_owned(),
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
