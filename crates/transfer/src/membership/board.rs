//! Where the newest view hangs: read without a lock, written by one thread.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use super::status::{Standing, Status};
use crate::homes::View;

/// Callback that receives each new view, in order. A thread of the membership calls it and waits
/// for it.
pub type OnView = Box<dyn Fn(&Arc<View>) + Send + Sync>;

/// The view, its callback, and how things stand.
pub(super) struct Board {
    view: ArcSwap<View>,
    on_view: OnView,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Since when the source has not been heard.
    stale_since: Option<Instant>,
    standing: Standing,
    error: Option<String>,
}

impl Board {
    pub(super) fn new(on_view: OnView, joins: bool) -> Board {
        let standing = if joins {
            Standing::Joining
        } else {
            Standing::Looking
        };
        Board {
            view: ArcSwap::default(),
            on_view,
            state: Mutex::new(State {
                stale_since: Some(Instant::now()),
                standing,
                error: None,
            }),
        }
    }

    pub(super) fn view(&self) -> Arc<View> {
        self.view.load_full()
    }

    pub(super) fn status(&self) -> Status {
        let state = self.state.lock();
        Status {
            is_current: state.stale_since.is_none(),
            stale: state.stale_since.map(|since| since.elapsed()),
            standing: state.standing,
            error: state.error.clone(),
        }
    }

    /// Hangs a view up where its hosts are others than before; the epoch of the same ones stays.
    pub(super) fn publish(&self, view: View) {
        if view.hosts() == self.view.load().hosts() && self.view.load().epoch() > 0 {
            return;
        }
        let (epoch, hosts) = (view.epoch(), view.hosts().len());
        tracing::info!(epoch, hosts, "membership view changed");
        let view = Arc::new(view);
        self.view.store(Arc::clone(&view));
        (self.on_view)(&view);
    }

    /// The source is heard.
    pub(super) fn heard(&self) {
        if let Some(since) = self.state.lock().stale_since.take() {
            let seconds = since.elapsed().as_secs_f64();
            tracing::info!(seconds, "membership source recovered");
        }
    }

    /// The source is not heard.
    pub(super) fn unheard(&self, error: &str) {
        let mut state = self.state.lock();
        state.error = Some(error.to_owned());
        if state.stale_since.is_none() {
            state.stale_since = Some(Instant::now());
            drop(state);
            tracing::warn!(
                error,
                "membership source unreachable; using the last list of hosts"
            );
        }
    }

    pub(super) fn stand(&self, standing: Standing) {
        let mut state = self.state.lock();
        if std::mem::replace(&mut state.standing, standing) != standing {
            drop(state);
            tracing::info!(?standing, "member state changed");
        }
    }

    /// Something went wrong on this host's way into the view.
    pub(super) fn trouble(&self, error: &str) {
        self.state.lock().error = Some(error.to_owned());
        tracing::debug!(error, "membership error");
    }
}

impl fmt::Debug for Board {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (view, state) = (&self.view, &self.state);
        let mut board = f.debug_struct("Board");
        board.field("view", view).field("state", state);
        board.finish_non_exhaustive()
    }
}
