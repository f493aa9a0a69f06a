//! Carriers between a batch and another carrier, which do what carriers should not.

use crate::carrier::{Alignment, Carrier, Op, Receipt};
use crate::error::Failure;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// A fault that is injected into a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// It fails with the system's `EIO`.
    Refused,
    /// Fewer bytes than were asked for are there.
    Short,
    /// Its receipt is dropped.
    Dropped,
    /// The carrier panics, and drops whatever else it was asked for with it.
    Panics,
}

impl Fault {
    /// Returns true if this fault explains the failure of a part.
    #[must_use]
    pub fn explains(self, failure: Failure) -> bool {
        match self {
            Self::Refused => failure == Failure::Os { errno: libc::EIO },
            Self::Short => matches!(failure, Failure::Short { carried: 0, .. }),
            Self::Dropped => failure == Failure::Unanswered,
            // Units of the slice that the lane had not come to are its own.
            Self::Panics => matches!(failure, Failure::Unanswered | Failure::LanePanicked),
        }
    }
}

/// Counts carries, whoever does them, and strikes one.
#[derive(Debug)]
pub struct Count {
    seen: AtomicUsize,
    nth: usize,
    fault: Fault,
    struck: Mutex<Option<Struck>>,
}

/// A carry that was struck: which way, where, and how many bytes.
pub(super) type Struck = (Op, u64, usize);

impl Count {
    /// Strikes the carry with this number, from 0.
    #[must_use]
    pub fn new(nth: usize, fault: Fault) -> Arc<Self> {
        Arc::new(Self {
            seen: AtomicUsize::new(0),
            nth,
            fault,
            struck: Mutex::default(),
        })
    }

    /// What it struck; nothing, where there were fewer.
    pub(super) fn struck(&self) -> Option<Struck> {
        *self.struck.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn strike(&self, receipt: &Receipt) {
        let struck = (receipt.op(), receipt.at(), receipt.len());
        *self.struck.lock().unwrap_or_else(PoisonError::into_inner) = Some(struck);
    }
}

/// Strikes one carry and leaves all others to another carrier.
#[derive(Debug)]
pub struct Faulty {
    inner: Arc<dyn Carrier>,
    count: Arc<Count>,
}

impl Faulty {
    /// One that counts together with others.
    #[must_use]
    pub fn new(inner: Arc<dyn Carrier>, count: &Arc<Count>) -> Arc<Self> {
        let count = Arc::clone(count);
        Arc::new(Self { inner, count })
    }
}

impl Carrier for Faulty {
    fn alignment(&self) -> Alignment {
        self.inner.alignment()
    }

    fn carry(self: Arc<Self>, receipts: Vec<Receipt>) {
        for receipt in receipts {
            let number = self.count.seen.fetch_add(1, Ordering::SeqCst);
            if number != self.count.nth {
                Arc::clone(&self.inner).carry(vec![receipt]);
                continue;
            }
            self.count.strike(&receipt);
            match self.count.fault {
                Fault::Refused => receipt.failed(Failure::Os { errno: libc::EIO }),
                Fault::Short => receipt.carried(0),
                Fault::Dropped => drop(receipt),
                // Without the hook, which would print what is no news.
                Fault::Panics => std::panic::resume_unwind(Box::new("injected")),
            }
        }
    }
}

/// Carries nothing, and keeps what it is asked for until its batch is cancelled or a test takes it.
#[derive(Debug)]
pub struct Keeping {
    at: u64,
    kept: Mutex<Vec<Receipt>>,
    came: Condvar,
}

impl Keeping {
    /// One that takes multiples of `at`, a power of two.
    #[must_use]
    pub fn new(at: usize) -> Arc<Self> {
        Arc::new(Self {
            at: at as u64,
            kept: Mutex::default(),
            came: Condvar::new(),
        })
    }

    /// Waits until it was asked for something.
    #[must_use]
    pub fn waits_for_one(&self, patience: Duration) -> bool {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let is_empty = |kept: &mut Vec<Receipt>| kept.is_empty();
        let waited = self.came.wait_timeout_while(kept, patience, is_empty);
        waited.is_ok_and(|(_, waited)| !waited.timed_out())
    }

    /// Waits for what it was asked for first, and no longer keeps that.
    ///
    /// # Panics
    ///
    /// When it is asked for nothing within `patience`.
    #[must_use]
    pub fn take(&self, patience: Duration) -> Receipt {
        assert!(self.waits_for_one(patience), "it is asked for nothing");
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.remove(0)
    }

    /// Gives up what nobody waits for any more; how many receipts.
    pub fn give_up_cancelled(&self) -> usize {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let gone: Vec<Receipt> = kept.extract_if(.., |one| one.is_cancelled()).collect();
        drop(kept);
        gone.len()
    }
}

impl Carrier for Keeping {
    fn alignment(&self) -> Alignment {
        let memory = Some(1);
        Alignment {
            at: self.at,
            memory,
        }
    }

    fn carry(self: Arc<Self>, receipts: Vec<Receipt>) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend(receipts);
        self.came.notify_all();
    }
}
