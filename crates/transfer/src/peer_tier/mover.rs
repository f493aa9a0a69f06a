//! Blocks go where their homes are now: those of this host's share whose homes are others since
//! hosts came or went, and copies that a block lacks because a home was lost.
//!
//! It goes over the share page by page, behind all that somebody waits for: its batches have the
//! lowest priority, and it rests after each for as long as that took.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_arena::{Identity, Key, NamespaceId, Place};
use kvdepot_media::Owner;
use parking_lot::{Condvar, Mutex};

use super::Common;
use super::held::{Copy, Own, rooms_of};
use super::hosts::Homes;
use super::messages::{Ask, Block, Keys, Said, Written};
use super::target::{Far, Target};
use crate::batch::Request;
use crate::config::Options;
use crate::flight::Op;
use crate::memory::Region;
use crate::remote::Remote;
use crate::task::{Priority, Status};

/// How long hosts are left to settle when they have changed.
const SETTLE: Duration = Duration::from_secs(1);

/// How often blocks that are not at home are looked for at first, and at most, while no host
/// changes.
const STRAYS_FIRST: Duration = Duration::from_secs(5);
const STRAYS_MOST: Duration = Duration::from_secs(600);

/// How often it looks whether there is something to do.
const LOOK: Duration = Duration::from_millis(200);

/// Blocks that are looked at together, and bytes that go together.
const PAGE: usize = 512;
const BATCH_BYTES: u64 = 16 << 20;

/// The mover of a host.
pub(super) struct Mover {
    common: Arc<Common>,
    closing: Mutex<bool>,
    closed: Condvar,
}

/// What a pass has come to.
#[derive(Default)]
struct Pass {
    moved: u64,
    /// Blocks that are still not at home.
    left: u64,
}

/// A block that goes to another host, and its room there.
type Going = (Own, Remote);

impl Mover {
    pub(super) fn new(common: &Arc<Common>) -> Mover {
        Mover {
            common: Arc::clone(common),
            closing: Mutex::new(false),
            closed: Condvar::new(),
        }
    }

    /// Works until it is told to end.
    pub(super) fn work(&self) {
        let (mut seen, mut since) = (0, Instant::now());
        let (mut done, mut pause, mut next) = (0, STRAYS_FIRST, Instant::now() + STRAYS_FIRST);
        while self.rest(LOOK) {
            let changes = self.common.hosts.changes();
            let now = Instant::now();
            if changes != seen {
                (seen, since) = (changes, now);
            }
            let all = seen != done && now.duration_since(since) >= SETTLE;
            if !all && now < next {
                continue;
            }
            let pass = self.pass(all);
            if all {
                (done, pause) = (seen, STRAYS_FIRST);
            }
            if pass.moved > 0 {
                let (blocks, left) = (pass.moved, pass.left);
                tracing::info!(blocks, left, "blocks have gone to their homes");
            }
            // What nobody takes is offered again later and later.
            pause = match pass.left > 0 && pass.moved == 0 {
                true => (pause * 2).min(STRAYS_MOST),
                false => STRAYS_FIRST,
            };
            next = Instant::now() + pause;
        }
    }

    pub(super) fn end(&self) {
        *self.closing.lock() = true;
        self.closed.notify_all();
    }

    /// Waits so long; false where all is to end.
    fn rest(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut closing = self.closing.lock();
        while !*closing && !self.closed.wait_until(&mut closing, until).timed_out() {}
        !*closing
    }

    /// Goes over the share once: `all` asks for the copies of blocks that are at home, too.
    fn pass(&self, all: bool) -> Pass {
        let mut pass = Pass::default();
        for (namespace, _) in self.common.share.arena().shares() {
            let mut from = Some(0);
            while let Some(slot) = from {
                let (blocks, next) = self.common.share.list(namespace, slot, PAGE);
                from = next.filter(|next| *next > slot);
                let keys = blocks.into_iter().map(|(key, _)| key);
                if !self.page(namespace, keys, all, &mut pass) {
                    return pass;
                }
            }
        }
        pass
    }

    /// False where all is to end.
    fn page(
        &self,
        namespace: NamespaceId,
        keys: impl Iterator<Item = Key>,
        all: bool,
        pass: &mut Pass,
    ) -> bool {
        let hosts = &self.common.hosts;
        let changes = hosts.changes();
        let home = |key: Key| (key, hosts.homes(&Identity { namespace, key }));
        let mut wanted: Vec<(Key, Homes)> = keys.map(home).collect();
        wanted.retain(|(_, homes)| !homes.far.is_empty() && (all || !homes.is_own));
        for (target, mut its) in by_target(&wanted) {
            let keys: Vec<Key> = its.iter().map(|at| wanted[*at].0).collect();
            let ask = Ask::Contains(Keys::new(namespace, keys.into_iter()));
            let Some(has) = flags(&target, &ask, its.len()) else {
                continue;
            };
            let mut has = has.into_iter();
            its.retain(|_| has.next() == Some(false));
            while !its.is_empty() {
                let begun = Instant::now();
                let keys = its.iter().map(|at| (wanted[*at].0, wanted[*at].1.is_own));
                let keys: Vec<(Key, bool)> = keys.collect();
                let stored = self.send(&target, namespace, &keys);
                pass.moved += stored.iter().filter(|stored| **stored).count() as u64;
                its.drain(..stored.len());
                if !self.rest(begun.elapsed()) {
                    return false;
                }
            }
        }
        wanted.retain(|(_, homes)| !homes.is_own);
        let mut lacks: Vec<usize> = wanted.iter().map(|(_, homes)| homes.far.len()).collect();
        for (target, its) in by_target(&wanted) {
            let keys = Keys::new(namespace, its.iter().map(|at| wanted[*at].0));
            let keeps = flags(&target, &Ask::Keeps(keys), its.len()).unwrap_or_default();
            for (at, keeps) in its.into_iter().zip(keeps) {
                lacks[at] -= usize::from(keeps);
            }
        }
        let gone = wanted.iter().zip(&lacks).filter(|(_, lacks)| **lacks == 0);
        let gone: Vec<Key> = gone.map(|((key, _), _)| *key).collect();
        pass.left += (wanted.len() - gone.len()) as u64;
        let share = &self.common.share;
        // Whoever was told meanwhile that this host keeps them may have let go of theirs.
        let _gate = share.hold_removals();
        if hosts.changes() == changes {
            share.leave(namespace, &gone);
        }
        self.rest(Duration::ZERO)
    }

    /// Sends the first of some blocks to a host: whether each is there now. Those that are at home
    /// here, too, take nobody's room there.
    fn send(
        &self,
        target: &Arc<Target>,
        namespace: NamespaceId,
        keys: &[(Key, bool)],
    ) -> Vec<bool> {
        let share = &self.common.share;
        let mut bytes = 0;
        let mut pinned: Vec<Option<Own>> = Vec::new();
        for (key, _) in keys {
            let place = share.pin(namespace, &[*key]).pop().flatten();
            bytes += place.map_or(0, |place| place.len);
            if bytes > BATCH_BYTES && !pinned.is_empty() {
                place.iter().for_each(|place| share.unpin(place.token));
                break;
            }
            pinned.push(place.map(|place| Own::new(share, place)));
        }
        let mut stored = vec![false; pinned.len()];
        let there = |(at, own): (usize, Option<Own>)| Some((at, own?));
        let (at, owns): (Vec<usize>, Vec<Own>) =
            pinned.into_iter().enumerate().filter_map(there).unzip();
        let blocks: Vec<Block> = at
            .iter()
            .zip(&owns)
            .map(|(at, own)| block_of(own.place(), !keys[*at].1))
            .collect();
        let lens: Vec<u64> = blocks.iter().map(|block| block.len).collect();
        let ask = Ask::Reserve {
            namespace: namespace.0,
            call: self.common.hosts.net().number(),
            blocks,
        };
        let said = target.hear(&ask);
        let Some(rooms) = said.and_then(|said| rooms_of(said, &lens, |id| Far::new(target, id)))
        else {
            return stored;
        };
        let (mut whose, mut far, mut going) = (Vec::new(), Vec::new(), Vec::new());
        for ((at, own), room) in at.into_iter().zip(owns).zip(rooms) {
            if let Ok((Copy::There(its), Some(remote))) = room {
                whose.push(at);
                far.push(its);
                going.push((own, remote));
            }
        }
        for (at, done) in whose.into_iter().zip(self.carry(target, going, far)) {
            stored[at] = done;
        }
        stored
    }

    /// Writes blocks into the room that they have, and has them published.
    fn carry(&self, target: &Arc<Target>, going: Vec<Going>, mut far: Vec<Far>) -> Vec<bool> {
        let mut done = vec![false; going.len()];
        let share = &self.common.share;
        let going = Arc::new(going);
        let (mut whose, mut requests) = (Vec::new(), Vec::new());
        for (number, (own, remote)) in going.iter().enumerate() {
            let place = own.place();
            let Ok(buffers) = share.buffers(place, 0, place.len) else {
                return done;
            };
            let mut offset = 0;
            for buffer in buffers {
                whose.push(number);
                requests.push(Request {
                    op: Op::Write,
                    local: buffer.addr() as u64,
                    remote,
                    offset,
                    len: buffer.len() as u64,
                });
                offset += buffer.len() as u64;
            }
        }
        let options = Options {
            timeout: self.common.hosts.net().patience,
            priority: Priority::Background,
        };
        // SAFETY: all requests name memory of pinned blocks, and read it; the owner keeps the pins.
        let region = unsafe { Region::any(Arc::clone(&going) as Owner) };
        let engine = &self.common.engine;
        let task = engine.submit_of(requests.into_iter(), options, region, Box::new(|_| ()));
        let Ok(task) = task else {
            return done;
        };
        // It has a deadline, and ends with the engine.
        let _over = task.wait(None);
        let mut whole = vec![true; done.len()];
        for (number, status) in whose.into_iter().zip(task.statuses()) {
            whole[number] &= status == Status::Done;
        }
        drop(task);
        // What is removed from here on waits until it is known whether it is there.
        let _gate = share.hold_removals();
        let is_going = |number: &usize| whole[*number] && share.is_there(going[*number].0.place());
        let all: Vec<usize> = (0..done.len()).filter(is_going).collect();
        let written = |number: &usize| Written {
            id: far[*number].id,
            checksum: going[*number].0.place().checksum.0,
            tail: Vec::new(),
        };
        let ask = Ask::Commit {
            blocks: all.iter().map(written).collect(),
            pinned: false,
        };
        if let Some((Said::Stored(stored), _)) = target.hear(&ask) {
            for (number, stored) in all.into_iter().zip(stored) {
                if stored.is_some() {
                    far[number].is_over();
                    done[number] = true;
                }
            }
        }
        done
    }
}

/// Which of some blocks have a home at each of the other hosts.
fn by_target(wanted: &[(Key, Homes)]) -> Vec<(Arc<Target>, Vec<usize>)> {
    let mut all: Vec<(Arc<Target>, Vec<usize>)> = Vec::new();
    for (at, (_, homes)) in wanted.iter().enumerate() {
        for far in &homes.far {
            match all.iter_mut().find(|(target, _)| Arc::ptr_eq(target, far)) {
                Some((_, its)) => its.push(at),
                None => all.push((Arc::clone(far), vec![at])),
            }
        }
    }
    all
}

/// What a host says of each of so many keys.
fn flags(target: &Arc<Target>, ask: &Ask, count: usize) -> Option<Vec<bool>> {
    match target.hear(ask) {
        Some((Said::Flags(flags), _)) if flags.len() == count => Some(flags),
        _ => None,
    }
}

fn block_of(place: &Place, evict: bool) -> Block {
    Block {
        key: place.identity.key.0,
        len: place.len,
        parts: place.parts,
        copy: true,
        evict,
    }
}
