//! What was opened, as lanes need it: the number of its grant, which may have to be asked for anew.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::grant::Rights;

/// What is known of a grant's number.
const KNOWN: u8 = 0;
const UNKNOWN: u8 = 1;
/// It is being asked for.
const ASKED: u8 = 2;
/// Nothing is granted under its name.
const GONE: u8 = 3;

/// How long a name that is not found is not asked for again: a target that has just started has yet
/// to publish.
const GONE_KEPT: Duration = Duration::from_millis(500);

/// A grant's number, and which of the engines at its peer's address has given it: to the next one
/// it is nothing, or something else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Granted {
    pub(crate) target: u32,
    pub(crate) number: u32,
}

impl Granted {
    fn bits(self) -> u64 {
        u64::from(self.target) << 32 | u64::from(self.number)
    }

    fn of(bits: u64) -> Granted {
        Granted {
            target: (bits >> 32) as u32,
            number: bits as u32,
        }
    }
}

/// What was opened, as lanes need it.
#[derive(Debug)]
pub(crate) struct Window {
    pub(crate) name: Vec<u8>,
    /// A [`Granted`].
    grant: AtomicU64,
    state: AtomicU8,
    /// When its name was not found.
    gone: Mutex<Option<Instant>>,
    pub(crate) len: u64,
    pub(crate) rights: Rights,
}

/// The number of a grant, or what is to be done about it.
pub(crate) enum Number {
    Known(Granted),
    /// Its name is to be opened again, by who was told so.
    ToAsk,
    Asked,
    Gone,
}

impl Window {
    pub(crate) fn new(name: &[u8], grant: Granted, len: u64, rights: Rights) -> Window {
        Window {
            name: name.to_vec(),
            grant: AtomicU64::new(grant.bits()),
            state: AtomicU8::new(KNOWN),
            gone: Mutex::new(None),
            len,
            rights,
        }
    }

    /// The number, for a request that is sent to this target now.
    pub(crate) fn number(&self, target: u32) -> Number {
        let (order, failed) = (Ordering::AcqRel, Ordering::Acquire);
        loop {
            return match self.state.compare_exchange(UNKNOWN, ASKED, order, failed) {
                Ok(_) => Number::ToAsk,
                Err(KNOWN) => {
                    let grant = self.grant();
                    // Looked at where it is taken: another lane may have just asked another one.
                    if grant.target != target {
                        self.forget(grant);
                        continue;
                    }
                    Number::Known(grant)
                }
                Err(ASKED) => Number::Asked,
                Err(_) if self.may_be_back() => continue,
                Err(_) => Number::Gone,
            };
        }
    }

    /// Whether its name was not found so long ago that it is asked for again from now on.
    fn may_be_back(&self) -> bool {
        let mut gone = self.gone.lock();
        if gone.is_none_or(|gone| gone.elapsed() < GONE_KEPT) {
            return false;
        }
        *gone = None;
        self.state.store(UNKNOWN, Ordering::Release);
        true
    }

    fn grant(&self) -> Granted {
        Granted::of(self.grant.load(Ordering::Acquire))
    }

    /// Whether its number is being asked for.
    pub(crate) fn is_asked_for(&self) -> bool {
        self.state.load(Ordering::Acquire) == ASKED
    }

    /// The target does not know this number.
    pub(crate) fn forget(&self, grant: Granted) {
        if self.grant() == grant {
            let (order, failed) = (Ordering::AcqRel, Ordering::Acquire);
            let _other = self.state.compare_exchange(KNOWN, UNKNOWN, order, failed);
        }
    }

    /// The number by which it is known from now on.
    pub(crate) fn renew(&self, grant: Granted) {
        self.grant.store(grant.bits(), Ordering::Release);
        self.state.store(KNOWN, Ordering::Release);
    }

    /// The question was lost.
    pub(crate) fn ask_again(&self) {
        self.state.store(UNKNOWN, Ordering::Release);
    }

    /// Nothing is granted under its name.
    pub(crate) fn note_gone(&self) {
        let mut gone = self.gone.lock();
        *gone = Some(Instant::now());
        self.state.store(GONE, Ordering::Release);
    }

    /// The number, where one is known.
    pub(crate) fn known(&self) -> Option<Granted> {
        let known = self.state.load(Ordering::Acquire) == KNOWN;
        known.then(|| self.grant())
    }
}
