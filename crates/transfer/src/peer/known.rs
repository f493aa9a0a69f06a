//! The targets that an engine knows, by their addresses.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::Peer;

/// Those that an engine knows.
#[derive(Default)]
pub(crate) struct Peers(Mutex<State>);

#[derive(Default)]
struct State {
    all: HashMap<SocketAddr, Arc<Peer>>,
    /// Lanes, by their positions, of those that were forgotten with writes that nobody has
    /// answered.
    fenced: HashMap<SocketAddr, Vec<usize>>,
    /// The first lane of each address, also of those that are fenced: two addresses may lead to one
    /// target, where lanes of one number take each other's place.
    first_lanes: HashMap<SocketAddr, u32>,
    /// First lanes that no address has any more.
    free_lanes: Vec<u32>,
}

impl State {
    /// Forgets one; whoever meets it again ends what was written to it before.
    fn remove(&mut self, peer: &Peer) {
        self.all.remove(&peer.address());
        let fenced = peer.fenced();
        if !fenced.is_empty() {
            self.fenced.insert(peer.address(), fenced);
        } else if let Some(first) = self.first_lanes.remove(&peer.address()) {
            self.free_lanes.push(first);
        }
    }
}

impl Peers {
    /// The one at an address, or a new one, which is made of its first lane and those that are
    /// fenced.
    pub(crate) fn find<E>(
        &self,
        address: SocketAddr,
        streams: usize,
        new: impl FnOnce(u32, &[usize]) -> Result<Peer, E>,
    ) -> Result<Arc<Peer>, E> {
        let mut state = self.0.lock();
        if let Some(peer) = state.all.get(&address) {
            return Ok(Arc::clone(peer));
        }
        let next = || (state.first_lanes.len() * streams) as u32;
        let known = state.first_lanes.get(&address).copied();
        let first = known.or_else(|| state.free_lanes.last().copied());
        let first = first.unwrap_or_else(next);
        let behind = state.fenced.get(&address).map_or(&[][..], Vec::as_slice);
        let peer = Arc::new(new(first, behind)?);
        if known.is_none() {
            state.free_lanes.pop();
            state.first_lanes.insert(address, first);
        }
        state.fenced.remove(&address);
        state.all.insert(address, Arc::clone(&peer));
        Ok(peer)
    }

    /// All of them.
    pub(crate) fn all(&self) -> Vec<Arc<Peer>> {
        self.0.lock().all.values().cloned().collect()
    }

    /// Forgets one: what is under way for it fails, and its connections end.
    pub(crate) fn forget(&self, address: SocketAddr) {
        let known = self.0.lock().all.get(&address).cloned();
        let Some(known) = known else { return };
        known.close();
        let mut state = self.0.lock();
        let is_it = |peer: &Arc<Peer>| Arc::ptr_eq(peer, &known);
        if state.all.get(&address).is_some_and(is_it) {
            state.remove(&known);
        }
    }

    /// Lets go of those that nobody uses any more.
    pub(crate) fn let_go(&self, now: Instant) {
        let mut state = self.0.lock();
        // Under the lock nobody else can begin to use one.
        let is_left = |peer: &&Arc<Peer>| peer.may_go(now) && Arc::strong_count(peer) == 1;
        let left: Vec<Arc<Peer>> = state.all.values().filter(is_left).cloned().collect();
        left.iter().for_each(|peer| state.remove(peer));
        drop(state);
        left.iter().for_each(|peer| peer.close());
    }

    /// Forgets all of them, for good.
    pub(crate) fn drain(&self) -> Vec<Arc<Peer>> {
        self.0.lock().all.drain().map(|(_, peer)| peer).collect()
    }
}
