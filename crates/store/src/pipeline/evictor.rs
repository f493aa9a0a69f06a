//! The thread that evicts ahead of need, so that those who need room seldom wait for a medium.
//!
//! Where a call has found no room once, eviction keeps a little free from then on (at most what
//! the protocol allows), a batch at a time. It holds an arena's lock for a batch's index work
//! alone; whoever needs room in the meantime waits for one batch at most, or makes room itself.
//!
//! It also says who keeps a medium from being written: processes that worked for its last owner.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kvdepot_arena::Error;
use kvdepot_host::Condvar;
use kvdepot_host::cpu;
use kvdepot_media::is_simulated;
use parking_lot::Mutex;

use super::Core;
use crate::tier::Arenas;

/// How long processes of a dead owner may take to end before anybody is told of them.
const ORPHANS_MAY_END: Duration = Duration::from_millis(200);

/// Wakes the thread.
#[derive(Default)]
pub(crate) struct Bell {
    state: Mutex<Rung>,
    rings: Condvar,
}

struct Rung {
    now: bool,
    stop: bool,
}

impl Default for Rung {
    fn default() -> Rung {
        // There may be something to say as soon as a depot is open.
        let (now, stop) = (true, false);
        Rung { now, stop }
    }
}

/// The running thread.
pub(crate) struct Evictor {
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Evictor {
    /// Starts the thread.
    pub(crate) fn start(core: &Arc<Core>) -> Result<Evictor, Error> {
        if is_simulated() {
            return Ok(Evictor {
                thread: Mutex::new(None),
            });
        }
        let core = Arc::clone(core);
        let spawned = cpu::spawn("kvdepot-evict", move || core.evict_when_asked());
        let thread = spawned.map_err(|source| Error::Io {
            path: "cannot start a thread".into(),
            source,
        })?;
        Ok(Evictor {
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Ends the thread, after the batch that it is at.
    pub(crate) fn stop(&self, core: &Core) {
        core.bell.state.lock().stop = true;
        core.bell.rings.notify_all();
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!(
                "internal error: eviction thread panicked; calls had to evict blocks themselves"
            );
        }
    }
}

impl Core {
    /// Has room made in a tier before the next blocks come, if it has little left.
    pub(super) fn evict_ahead(&self, tier: usize) {
        if self.tiers[tier].here().is_some_and(Arenas::is_low) {
            self.bell.state.lock().now = true;
            self.bell.rings.notify_one();
        }
    }

    /// Evicts the batch that the thread would next; false when nobody has asked, or all is done.
    #[cfg(feature = "sim")]
    pub(crate) fn step_evictor(&self) -> bool {
        if !std::mem::take(&mut self.bell.state.lock().now) {
            return false;
        }
        let evicted = self.arenas().any(|(_, tier)| tier.evict_ahead());
        self.bell.state.lock().now |= evicted;
        evicted
    }

    fn evict_when_asked(&self) {
        loop {
            {
                let mut rung = self.bell.state.lock();
                while !rung.now && !rung.stop {
                    self.bell.rings.wait(&mut rung);
                }
                if rung.stop {
                    return;
                }
                rung.now = false;
            }
            for (_, tier) in self.arenas() {
                while tier.evict_ahead() {
                    if self.bell.state.lock().stop {
                        return;
                    }
                }
            }
            self.name_orphans();
        }
    }

    /// Says who keeps whole media from being written, if that lasts.
    fn name_orphans(&self) {
        let mut media = self.media();
        media.retain(|arena| arena.has_unnamed_orphans());
        if media.is_empty() {
            return;
        }
        let mut rung = self.bell.state.lock();
        if !rung.stop {
            self.bell.rings.wait_for(&mut rung, ORPHANS_MAY_END);
        }
        if !rung.stop {
            drop(rung);
            media.iter().for_each(|arena| arena.name_orphans());
        }
    }
}
