//! How workers of this host read, by themselves and straight into memory of their own, what its
//! depot has pinned at another host.
//!
//! The pin stays the depot's. Its home lends it once more, to whoever can name the depot's engine
//! and the pin: numbers that are told to nobody else. When the pin ends all that goes with it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_arena::Error;
use kvdepot_host::fork::Origin;
use kvdepot_media::Buffer;
use kvdepot_store::{Borrowed, Door, Outside};
use parking_lot::Mutex;

use super::TO_CLOSE;
use super::desk::Desk;
use super::held::Span;
use super::loan::Loan;
use super::messages::{Ask, Id, KEYS_MAX, Said};
use super::options::refused;
use super::pass::{Pass, home_of};
use super::target::{Net, Target};
use super::wire::{Line, Lines, Wire};
use crate::config::Config;
use crate::engine::Engine;
use crate::grant::Rights;

/// Threads that say what has come of batches.
const THREADS: usize = 2;

/// How long a home is known that nothing is read from: hosts come and go.
const IDLE: Duration = Duration::from_secs(300);

/// A worker's door.
pub(super) struct PeerDoor {
    net: Arc<Net>,
    timeout: Duration,
    finisher: Arc<Desk>,
    homes: Mutex<HashMap<SocketAddr, (Arc<Target>, Instant)>>,
    origin: Origin,
}

/// A block that a home was asked for.
struct Lent(Span);

impl Borrowed for Lent {
    fn buffer(&self, offset: u64, len: u64) -> Buffer {
        self.0.buffer(offset, len, false)
    }
}

impl PeerDoor {
    /// Opens the door that a depot's key is to.
    pub(super) fn open(key: &[u8]) -> Result<PeerDoor, Error> {
        let pass: Pass = postcard::from_bytes(key).map_err(|_| {
            Error::input(
                "remote reader",
                "a malformed key",
                "a key from a server of the same release",
            )
        })?;
        let config = Config {
            listen: None,
            token: pass.token,
            tls: pass.tls,
            // Who reads verifies.
            checksum: false,
            local: false,
            rdma: Some(Vec::new()),
            timeout: pass.lookup,
            ..Config::default()
        };
        let engine = Arc::new(Engine::start(config).map_err(refused)?);
        Ok(PeerDoor {
            net: Arc::new(Net::new(engine, pass.lookup, pass.timeout)),
            timeout: pass.timeout,
            finisher: Desk::new("kvdepot-carried", THREADS),
            homes: Mutex::default(),
            origin: Origin::here()?,
        })
    }

    fn home(&self, address: SocketAddr) -> Arc<Target> {
        let now = Instant::now();
        let new = || {
            let wire = Wire::new(&self.net.engine, self.timeout, &self.finisher);
            Arc::new(Target::anyone(address, &self.net, wire))
        };
        let mut homes = self.homes.lock();
        let idle = homes.extract_if(|other, (home, used)| {
            *other != address && Arc::strong_count(home) == 1 && now > *used + IDLE
        });
        let idle: Vec<SocketAddr> = idle.map(|(address, _)| address).collect();
        let (home, used) = homes.entry(address).or_insert_with(|| (new(), now));
        // The depot has just pinned something there: it answers.
        if home.is_down() {
            *home = new();
        }
        *used = now;
        let home = Arc::clone(home);
        drop(homes);
        for address in idle {
            self.net.engine.forget(address);
        }
        home
    }
}

/// Asks a home for pins of one holder; where their bytes will be.
fn ask(home: &Arc<Target>, holder: [u8; 16], wanted: &[(Id, u64)]) -> Vec<Box<dyn Borrowed>> {
    let loan = Arc::new(Loan::new());
    let lens: Vec<u64> = wanted.iter().map(|(_, len)| *len).collect();
    let each = lens.iter().enumerate();
    let spans = each.map(|(at, len)| {
        let line = Line::Borrowed(Arc::clone(&loan), at);
        let span = Span::new(&home.wire, Lines::new(vec![line], *len));
        Box::new(Lent(span)) as Box<dyn Borrowed>
    });
    let spans = spans.collect();
    let ids = wanted.iter().map(|(id, _)| *id).collect();
    // Also where the question is dropped, those that wait hear of it.
    let answered = Answered(loan);
    home.ask(Ask::Borrow { holder, ids }, move |said| {
        let Some((Said::Lent(grants), lender)) = said else {
            return;
        };
        if grants.len() == lens.len() {
            let each = grants.into_iter().zip(lens);
            let each = each.map(|(grant, len)| Some(lender.lent(grant?, len, Rights::READ)));
            answered.0.answer(each.collect());
        }
    });
    spans
}

/// Nothing is lent where this is dropped before there was an answer.
struct Answered(Arc<Loan>);

impl Drop for Answered {
    fn drop(&mut self) {
        if !self.0.is_known() {
            self.0.answer(Vec::new());
        }
    }
}

/// Blocks of one home and holder: index in the call, name, length.
type Wanted = Vec<(usize, (Id, u64))>;

impl Door for PeerDoor {
    fn borrow(&self, blocks: &[(&Outside, u64)]) -> Vec<Option<Box<dyn Borrowed>>> {
        let mut wanted: HashMap<(SocketAddr, [u8; 16]), Wanted> = HashMap::new();
        for (index, (at, len)) in blocks.iter().enumerate() {
            if let Some(whose) = home_of(at) {
                let of = wanted.entry(whose).or_default();
                of.push((index, (at.number, *len)));
            }
        }
        let mut all: Vec<Option<Box<dyn Borrowed>>> = blocks.iter().map(|_| None).collect();
        for ((address, holder), blocks) in wanted {
            let home = self.home(address);
            for some in blocks.chunks(KEYS_MAX) {
                let (indices, some): (Vec<usize>, Vec<(Id, u64)>) = some.iter().copied().unzip();
                let borrowed = ask(&home, holder, &some);
                indices
                    .into_iter()
                    .zip(borrowed)
                    .for_each(|(index, one)| all[index] = Some(one));
            }
        }
        all
    }
}

impl Drop for PeerDoor {
    fn drop(&mut self) {
        // In a forked child there are no threads to wait for.
        if !self.origin.is_here() {
            return;
        }
        let deadline = Instant::now() + TO_CLOSE;
        self.net.engine.close();
        let homes: Vec<_> = self.homes.lock().drain().collect();
        homes.iter().for_each(|(_, (home, _))| home.end(deadline));
        self.finisher.end(deadline);
    }
}
