//! Tiers chained near to far: the near one answers first, far hits are promoted in the
//! background, puts go on from tier to tier by bounded queues, one at each `edge`.
//!
//! `admission` says what is not stored, `ledger` holds what is under way, `loads` whom others wait
//! for that want the same, `budget` says how much of
//! it may wait and whose it is, `put` and `get` are the calls, `caller` says whose memory they
//! move, `lookup` asks the index, `grouped` what belongs together, `two_phase` and `pins` the same
//! verbs for engines whose scheduler and workers are different processes, `background` the thread
//! that writes back and promotes, `evictor` the one that evicts ahead of need, `replicate` the copy
//! between two tiers that both use, `spending` how much may be written over an edge, `turns` cuts
//! calls into steps, a few of which are in flight.

mod admission;
mod ask;
mod awaited;
mod background;
mod budget;
mod caller;
mod devices;
mod drain;
mod edge;
mod evictor;
mod get;
mod grouped;
mod joins;
mod ledger;
mod loads;
mod lookup;
mod onward;
mod pins;
mod prefetch;
mod promotions;
mod prompts;
mod put;
mod replicate;
mod spending;
mod turns;
mod two_phase;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

pub(crate) use admission::Learned;
pub(crate) use awaited::Awaited;
pub(crate) use background::Background;
pub use caller::{Caller, Errand, Lanes, MovesDone};
pub use drain::Drained;
pub(crate) use edge::{Edge, Saved};
pub(crate) use evictor::{Bell, Evictor};
pub use get::{GetOptions, plan};
pub use grouped::Grouped;
use kvdepot_arena::gate::Gate;
use kvdepot_arena::{Arena, Error, Place, Uses};
use kvdepot_media::Copier;
pub(crate) use ledger::Ledger;
pub(crate) use loads::Loads;
pub(crate) use lookup::heard;
pub use pins::Pin;
pub(crate) use prompts::Prompts;
pub use two_phase::{NoRoom, Reservation};

use crate::config::{Config, Overload};
use crate::journal::Journal;
use crate::keyring::Keyring;
use crate::metrics::{Metrics, Op};
use crate::task::{Mirror, Outcome, Task};
use crate::tier::{Apart, Arenas, Directory, DoorKey, Outside, Stage};

/// Index, tiers and threads of a depot in this process; all of its calls share them.
pub struct Core {
    /// Near to far.
    pub(crate) tiers: Vec<Stage>,
    /// What is between each and the next.
    pub(crate) edges: Vec<Edge>,
    /// The nearest tier that outlives the process: what is there is acknowledged. Where none does,
    /// the nearest.
    pub(crate) ack: usize,
    pub(crate) copier: Copier,
    /// For copies that nobody waits for: on busy processors they give way. Only where there are
    /// several tiers.
    pub(crate) idle_copier: Option<Copier>,
    pub(crate) ledger: Ledger,
    pub(crate) loads: Arc<Loads>,
    /// Prefetched blocks that no call has read yet.
    pub(crate) awaited: Awaited,
    /// Of the thread that evicts ahead of need.
    pub(crate) bell: Bell,
    /// Gate that each call passes; closing waits for the calls inside.
    pub gate: Arc<Gate>,
    pub(crate) metrics: Metrics,
    pub(crate) overload: Overload,
    pub(crate) promote: bool,
    /// What is known of the blocks that pass by; `None` where everything is stored.
    pub(crate) learned: Option<Learned>,
    /// Namespaces that are stored whatever is known.
    pub(crate) saved: Arc<Saved>,
    pub(crate) uses: Uses,
    /// Later than all uses before the depot was opened.
    pub(crate) opened: u64,
    pub(crate) prompts: Prompts,
    /// What blocks are authenticated with.
    pub(crate) keys: Option<Arc<Keyring>>,
    pub(crate) next_medium: AtomicU32,
    pub(crate) next_group: AtomicU64,
    pub(crate) config: Config,
    /// Where other processes attach, once somebody listens there.
    pub(crate) socket: OnceLock<PathBuf>,
    /// Callback with the number of each medium that was removed, if it is set.
    pub on_removal: OnceLock<Box<dyn Fn(u32) + Send + Sync>>,
}

impl Core {
    pub(crate) fn near(&self) -> &Stage {
        &self.tiers[0]
    }

    /// Whether a block of so many bytes goes past a tier at once: it can never take it, nor, where
    /// puts wait for what is behind it, the part of it that may wait.
    pub(crate) fn bypasses(&self, tier: usize, len: u64) -> bool {
        let waits = self.edges.get(tier).filter(|_| tier < self.ack);
        let depth = waits.map_or(u64::MAX, |edge| edge.budget.depth());
        len > self.tiers[tier].block_max().min(depth)
    }

    /// Creates the task of a call for `keys` keys, and counts the call.
    pub fn begin(&self, op: Op, keys: usize, caller: &Caller, mirror: Option<Mirror>) -> Task {
        let bytes = (0..keys).map(|index| caller.bytes(index)).sum();
        self.metrics.begin(op, keys as u64, bytes);
        let journal = Journal::dispatched(op.name(), keys, bytes);
        Task::with_mirror(keys, journal, mirror)
    }

    /// The outcome of a block whose put came to nothing.
    pub(crate) fn lost(&self) -> Outcome {
        match self.gate.hurries() {
            true => Outcome::Closed,
            false => Outcome::Dropped,
        }
    }

    /// Whether it is another tier than the near one that acknowledges what that holds.
    pub(crate) fn acknowledges_far(&self) -> bool {
        self.ack > 0
    }

    /// Whether a put may be acknowledged by what a tier has: it lasts, or nothing does, or the
    /// block goes on to one that does.
    pub(crate) fn takes_puts(&self, tier: usize) -> bool {
        tier <= self.ack || self.tiers[tier].lasts()
    }

    /// Whether blocks of a tier go on to another one.
    pub(crate) fn goes_on(&self, tier: usize) -> bool {
        tier < self.edges.len()
    }

    /// Bytes on their way to tiers that have not got them yet.
    pub(crate) fn queued_bytes(&self) -> u64 {
        self.edges.iter().map(|edge| edge.budget.bytes()).sum()
    }

    /// Waits until the lower tiers have every block that was queued for write-back before.
    ///
    /// Returns false at the time-out.
    pub fn drain(&self, timeout: Duration) -> bool {
        self.ledger.drain(timeout)
    }

    /// Returns the name of the tier at position `tier`.
    ///
    /// # Panics
    ///
    /// If `tier` is not a position in the pipeline.
    pub fn tier_name(&self, tier: usize) -> &'static str {
        self.tiers[tier].name()
    }

    /// Returns the current media, first tier to last.
    ///
    /// Placements contain the number of a medium ([`Arena::number`]). Numbers rise in the order in
    /// which media are added, and each is used once. A medium that has grown keeps its number.
    pub fn media(&self) -> Vec<Arc<Arena>> {
        self.arenas().flat_map(|(_, tier)| tier.arenas()).collect()
    }

    /// Returns the directories of asynchronous tiers whose blocks other processes can copy.
    ///
    /// Placements contain the number that is returned with each.
    pub fn directories(&self) -> Vec<(u32, Directory)> {
        let apart = self.tiers.iter().filter_map(Stage::apart);
        apart.filter_map(Apart::directory).collect()
    }

    /// Reads the credentials of asynchronous tiers again.
    ///
    /// # Errors
    ///
    /// That of the first tier whose credentials cannot be used.
    pub fn renew(&self) -> Result<(), Error> {
        let mut apart = self.tiers.iter().filter_map(Stage::apart);
        apart.try_for_each(|apart| apart.tier().renew())
    }

    /// Returns the keys with which processes of this user read blocks of asynchronous tiers on
    /// other hosts.
    ///
    /// Placements contain the number that is returned with each.
    pub fn doors(&self) -> Vec<(u32, DoorKey)> {
        let apart = self.tiers.iter().filter_map(Stage::apart);
        apart.filter_map(Apart::door).collect()
    }

    /// Returns the arenas of this process in which asynchronous tiers have blocks.
    pub fn arenas_apart(&self) -> Vec<Arc<Arena>> {
        let apart = self.tiers.iter().filter_map(Stage::apart);
        apart
            .filter_map(|apart| apart.tier().ends().arena())
            .collect()
    }

    /// Returns the location of a pinned or reserved block outside of all media, if it has one.
    ///
    /// `tier` is the position of the tier, and `place` the pinned or reserved block.
    pub fn outside_at(&self, tier: usize, place: &Place) -> Option<Outside> {
        let apart = self.tiers.get(tier)?.apart()?;
        apart.tier().ends().outside(place)
    }

    /// The tiers of arenas, with their positions.
    pub(crate) fn arenas(&self) -> impl Iterator<Item = (usize, &Arenas)> {
        let each = self.tiers.iter().enumerate();
        each.filter_map(|(at, tier)| Some((at, tier.here()?)))
    }

    /// The number of a medium that appears now.
    pub(crate) fn next_medium(&self) -> u32 {
        self.next_medium.fetch_add(1, Ordering::Relaxed)
    }
}
