//! Loads from tiers that are slow to read. While one call loads a block, others that want it wait
//! until the near tier has it, and are served from there: the medium is read for one of them.
//!
//! A [`Load`] is a value that goes with its block from the call to the block's promotion. Wherever
//! it is dropped, those who joined it go on: with what the near tier has then, or by themselves.
//! Who waits has no load of what it waits for, nor a pin or a reservation, and joins once.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use kvdepot_arena::held::Mutex;
use kvdepot_arena::{Error, Identity, clock};

use crate::config::Config;
use crate::tier::{Alarm, Reply, Stage, ask};

/// What is being loaded, and who waits for it.
pub(crate) struct Loads {
    /// The nearest tier of those that are slow to read; `None` where nobody can wait for another.
    from: Option<usize>,
    /// How long somebody waits at most: as long as a tier may take to answer and to be read.
    limit: Duration,
    alarm: Option<Arc<Alarm>>,
    state: Mutex<State>,
    /// Blocks that the near tier has got.
    arrived: AtomicU64,
    /// Loads that somebody has joined since the beginning.
    joins: AtomicU64,
}

#[derive(Default)]
struct State {
    loading: HashMap<Identity, Loading>,
    begun: u64,
}

struct Loading {
    number: u64,
    begun: Instant,
    is_joined: Arc<AtomicBool>,
    /// It may take its time: who wants it loads it without a word.
    is_slow: bool,
    waits: Vec<Arc<Wait>>,
}

/// A block that is being loaded, or promoted, by whoever has this.
pub(super) struct Load {
    loads: Arc<Loads>,
    identity: Identity,
    number: u64,
    is_joined: Arc<AtomicBool>,
}

/// Keys of one call that wait for the loads of others; they go on when all of those are over.
struct Wait {
    then: OnceLock<Box<dyn FnOnce() + Send + Sync>>,
    /// The question that its limit ends.
    _limit: Reply<()>,
}

/// What became of keys that a call has to load.
#[derive(Default)]
pub(super) struct Begun {
    /// Of those that it loads, where nobody else has it.
    pub(super) loads: Vec<(usize, Load)>,
    /// Those that it waits for.
    pub(super) joined: Vec<usize>,
    wait: Option<Arc<Wait>>,
    names: Vec<(Identity, u64)>,
    limit: Option<crate::tier::Pending<()>>,
}

/// Whether a call waits for the loads of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Joining {
    /// For each; it loads the rest meanwhile.
    Each,
    /// Where there is one it begins none of its own: it could not go on with them.
    First,
    /// It has waited.
    Never,
}

impl Loads {
    /// Those of a pipeline. What is mapped is read as fast as the near tier.
    pub(crate) fn new(
        tiers: &[Stage],
        config: &Config,
        alarm: Option<Arc<Alarm>>,
    ) -> Result<Arc<Loads>, Error> {
        let is_slow = |tier: &Stage| match tier {
            Stage::Here(arenas) => arenas.arenas().iter().any(|one| one.mapping().is_err()),
            Stage::Apart(_) => true,
        };
        let waits = config.promote && tiers[0].here().is_some();
        let from = (1..tiers.len()).find(|tier| waits && is_slow(&tiers[*tier]));
        let slow = from.map_or(&[][..], |from| &tiers[from..]);
        let patience = |tier: &Stage| {
            let (lookup, other) = config.patience(tier.name());
            lookup.saturating_add(other)
        };
        let alarm = match (from, alarm) {
            (None, _) => None,
            (Some(_), Some(alarm)) => Some(alarm),
            (Some(_), None) => Some(Arc::new(Alarm::start()?)),
        };
        Ok(Arc::new(Loads {
            from,
            limit: slow.iter().map(patience).max().unwrap_or_default(),
            alarm,
            state: Mutex::default(),
            arrived: AtomicU64::new(0),
            joins: AtomicU64::new(0),
        }))
    }

    /// Whether loads from this tier on are waited for, and not from a nearer one.
    pub(super) fn begin_at(&self, tier: usize) -> bool {
        self.from == Some(tier)
    }

    /// How many blocks the near tier has got: who sees another number than before looks there
    /// again.
    pub(super) fn arrived(&self) -> u64 {
        self.arrived.load(Ordering::Acquire)
    }

    /// Number of loads that somebody has joined since the beginning: if it is the same as before,
    /// loads that nobody had joined then are not joined now.
    pub(super) fn joins(&self) -> u64 {
        self.joins.load(Ordering::Acquire)
    }

    /// Blocks that are being loaded.
    pub(crate) fn under_way(&self) -> usize {
        self.state.lock().loading.len()
    }

    /// Nobody has the time to wait any more.
    pub(crate) fn hurry(&self) {
        self.alarm.iter().for_each(|alarm| alarm.hurry());
    }

    /// Ends its threads.
    pub(crate) fn close(&self) {
        self.alarm.iter().for_each(|alarm| alarm.stop());
    }

    /// A block of this tier is about to be promoted; `None` where somebody loads it, or where
    /// nobody would wait.
    pub(super) fn claim(self: &Arc<Loads>, tier: usize, identity: Identity) -> Option<Load> {
        self.from.filter(|from| tier >= *from)?;
        self.state.lock().claim(self, identity)
    }

    /// Begins the loads of these keys, or joins those who load them.
    pub(super) fn begin(
        self: &Arc<Loads>,
        names: &[(usize, Identity)],
        joining: Joining,
        may_load: bool,
    ) -> Begun {
        let mut begun = Begun::default();
        let mut state = self.state.lock();
        if joining != Joining::Never {
            begun.join(self, &mut state, names);
        }
        if begun.joined.is_empty() || joining != Joining::First {
            // Both are in the order of the keys.
            let mut joined = begun.joined.iter().peekable();
            for (index, identity) in names {
                let is_joined = joined.next_if_eq(&index).is_some();
                if !is_joined && may_load {
                    let load = state.claim(self, *identity);
                    begun.loads.extend(load.map(|load| (*index, load)));
                }
            }
        }
        begun
    }

    /// Has `then` run when the loads that a call has joined are over, or have taken too long.
    pub(super) fn wait(
        self: &Arc<Loads>,
        begun: Begun,
        then: impl FnOnce() + Send + Sync + 'static,
    ) {
        let Begun {
            wait: Some(wait),
            limit: Some(limit),
            names,
            ..
        } = begun
        else {
            return;
        };
        let _once = wait.then.set(Box::new(then));
        let (loads, waits) = (Arc::downgrade(self), Arc::downgrade(&wait));
        let alarm = self.alarm.as_deref().map(|alarm| (alarm, self.limit));
        limit.then(alarm, move |_| forsake(&loads, &waits, &names));
        // Where they are over already, it goes on here.
        drop(wait);
    }
}

#[cfg(test)]
impl Loads {
    /// Of a pipeline whose second tier is slow to read.
    pub(super) fn of_one_tier() -> Arc<Loads> {
        Arc::new(Loads {
            from: Some(1),
            limit: Duration::MAX,
            alarm: None,
            state: Mutex::default(),
            arrived: AtomicU64::new(0),
            joins: AtomicU64::new(0),
        })
    }

    /// A load that somebody has joined.
    pub(super) fn joined(self: &Arc<Loads>, identity: Identity) -> Load {
        let load = self.claim(1, identity).unwrap();
        self.join(identity);
        load
    }

    /// Joins a load.
    pub(super) fn join(self: &Arc<Loads>, identity: Identity) {
        let begun = self.begin(&[(0, identity)], Joining::First, false);
        assert_eq!(begun.joined, [0]);
    }
}

/// Nobody waits any longer for these, nor joins them.
fn forsake(loads: &Weak<Loads>, waits: &Weak<Wait>, names: &[(Identity, u64)]) {
    // They are over, where nobody waits.
    let (Some(loads), Some(_last)) = (loads.upgrade(), waits.upgrade()) else {
        return;
    };
    let forsaken: Vec<Loading> = {
        let mut state = loads.state.lock();
        let each = names.iter();
        each.filter_map(|(identity, number)| state.end(identity, *number))
            .collect()
    };
    drop(forsaken);
}

impl State {
    fn claim(&mut self, loads: &Arc<Loads>, identity: Identity) -> Option<Load> {
        let Entry::Vacant(vacant) = self.loading.entry(identity) else {
            return None;
        };
        self.begun += 1;
        let (number, is_joined) = (self.begun, Arc::default());
        vacant.insert(Loading {
            number,
            begun: clock::now(),
            is_joined: Arc::clone(&is_joined),
            is_slow: false,
            waits: Vec::new(),
        });
        Some(Load {
            loads: Arc::clone(loads),
            identity,
            number,
            is_joined,
        })
    }

    /// Takes a load out, with those who wait for it: they go on where that is dropped, which is not
    /// under the lock.
    fn end(&mut self, identity: &Identity, number: u64) -> Option<Loading> {
        match self.loading.entry(*identity) {
            Entry::Occupied(loading) if loading.get().number == number => Some(loading.remove()),
            Entry::Occupied(_) | Entry::Vacant(_) => None,
        }
    }
}

impl Begun {
    fn join(&mut self, loads: &Loads, state: &mut State, names: &[(usize, Identity)]) {
        for (index, identity) in names {
            let loading = state.loading.get_mut(identity);
            // One that has taken too long already is waited for by nobody.
            let is_fit = |one: &&mut Loading| !one.is_slow && clock::since(one.begun) < loads.limit;
            let Some(loading) = loading.filter(is_fit) else {
                continue;
            };
            let wait = self.wait.get_or_insert_with(|| {
                let (reply, limit) = ask();
                self.limit = Some(limit);
                Arc::new(Wait {
                    then: OnceLock::new(),
                    _limit: reply,
                })
            });
            loading.waits.push(Arc::clone(wait));
            if !loading.is_joined.swap(true, Ordering::Relaxed) {
                loads.joins.fetch_add(1, Ordering::Release);
            }
            self.names.push((*identity, loading.number));
            self.joined.push(*index);
        }
    }
}

impl Load {
    /// Whether somebody waits for it.
    pub(super) fn is_joined(&self) -> bool {
        self.is_joined.load(Ordering::Relaxed)
    }

    /// Has nobody wait any more.
    pub(super) fn turn_away(&self) {
        let waits = {
            let mut state = self.loads.state.lock();
            let loading = state.loading.get_mut(&self.identity);
            let mine = loading.filter(|loading| loading.number == self.number);
            mine.map(|loading| {
                loading.is_slow = true;
                std::mem::take(&mut loading.waits)
            })
        };
        drop(waits);
    }

    /// The near tier has the block.
    pub(super) fn arrived(&self) {
        self.loads.arrived.fetch_add(1, Ordering::Release);
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let over = self.loads.state.lock().end(&self.identity, self.number);
        drop(over);
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        if let Some(then) = self.then.take() {
            then();
        }
    }
}
