//! Blocks go where their homes are now: those of this host's share whose homes are others since
//! hosts came or went, and copies that a block lacks because a home was lost.
//!
//! It goes over the share page by page, behind all that somebody waits for: its batches have the
//! lowest priority, and it rests for as long as it works.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_arena::{Identity, Key, NamespaceId, Place, Token};
use kvdepot_host::Condvar;
use kvdepot_media::Owner;
use parking_lot::Mutex;

use super::Common;
use super::held::{Copy, Own, rooms_of};
use super::hosts::Homes;
use super::messages::{Ask, Block, Keys, Said, Why, Written};
use super::target::{Far, Target};
use crate::batch::Request;
use crate::config::Options;
use crate::flight::Op;
use crate::memory::Region;
use crate::remote::Remote;
use crate::task::{Priority, Status};

/// How long hosts are left to settle when they have changed, and at most.
const SETTLE: Duration = Duration::from_secs(1);
const SETTLE_MOST: Duration = Duration::from_secs(30);

/// How often blocks that are not at home are looked for at first, and at most, while no host
/// changes and none is found that goes.
const STRAYS_FIRST: Duration = Duration::from_secs(5);
const STRAYS_MOST: Duration = Duration::from_secs(60);

/// How often it looks whether there is something to do.
const LOOK: Duration = Duration::from_millis(200);

/// Blocks that are looked at together, bytes that go together, and how long they may take.
const PAGE: usize = 512;
const BATCH_BYTES: u64 = 4 << 20;
const TIMEOUT: Duration = Duration::from_secs(60);

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
    /// Blocks that are still not at home, or lack a copy.
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
        let begun = Instant::now();
        let (mut seen, mut since, mut first) = (0, begun, begun);
        let (mut done, mut pause, mut next) = (0, STRAYS_FIRST, begun + STRAYS_FIRST);
        while self.rest(LOOK) {
            let hosts = &self.common.hosts;
            let (changes, now) = (hosts.changes(), Instant::now());
            if changes != seen {
                if seen == done {
                    first = now;
                }
                (seen, since, next, pause) = (changes, now, now, STRAYS_FIRST);
                self.common.share.spread(hosts);
            }
            let all = seen != done;
            let settles = now.duration_since(since) < SETTLE;
            let may_wait = now.duration_since(first) < SETTLE_MOST;
            if now < next || (all && settles && may_wait) || !hosts.is_known() {
                continue;
            }
            let pass = catch_unwind(AssertUnwindSafe(|| self.pass(all)));
            let pass = pass.unwrap_or_else(|_| {
                tracing::error!(
                    "internal error: rebalancing of blocks between hosts panicked; blocks stay on \
                     their current hosts until a retry"
                );
                Pass { moved: 0, left: 1 }
            });
            if pass.left == 0 {
                done = seen;
            }
            if pass.moved > 0 {
                let (blocks, left) = (pass.moved, pass.left);
                tracing::info!(blocks, left, "rebalanced blocks");
            }
            // What nobody takes is offered again later and later.
            pause = match pass.moved {
                0 => (pause * 2).min(STRAYS_MOST),
                _ => STRAYS_FIRST,
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

    /// Goes over the share once: `all` asks for the copies of blocks that are at home, too. It
    /// rests after each page for as long as that took.
    fn pass(&self, all: bool) -> Pass {
        let mut pass = Pass::default();
        for (namespace, _) in self.common.share.arena().shares() {
            let mut from = Some(0);
            while let Some(slot) = from {
                let begun = Instant::now();
                let (blocks, next) = self.common.share.list(namespace, slot, PAGE);
                from = next.filter(|next| *next > slot);
                let keys = blocks.into_iter().map(|(key, _)| key);
                self.page(namespace, keys, all, &mut pass);
                if !self.rest(begun.elapsed()) {
                    return pass;
                }
            }
        }
        pass
    }

    fn page(
        &self,
        namespace: NamespaceId,
        keys: impl Iterator<Item = Key>,
        all: bool,
        pass: &mut Pass,
    ) {
        let hosts = &self.common.hosts;
        let changes = hosts.changes();
        let home = |key: Key| (key, hosts.homes(&Identity { namespace, key }));
        let mut wanted: Vec<(Key, Homes)> = keys.map(home).collect();
        wanted.retain(|(_, homes)| homes.is_stray || (all && homes.is_own));
        // Which lack it, by those who answer; and whether somebody has it but for this host.
        let mut elsewhere = vec![false; wanted.len()];
        let mut lacks: Vec<(Arc<Target>, Vec<usize>)> = Vec::new();
        for (target, mut its) in by_target(&wanted) {
            let asked = Keys::new(namespace, its.iter().map(|at| wanted[*at].0));
            let Some(has) = flags(&target, &Ask::Contains(asked), its.len()) else {
                pass.left += its.len() as u64;
                continue;
            };
            let mut has = has.into_iter();
            its.retain(|at| {
                let has = has.next() == Some(true);
                elsewhere[*at] |= has;
                !has
            });
            lacks.push((target, its));
        }
        for (target, its) in lacks {
            let key = |at: &usize| (wanted[*at].0, wanted[*at].1.is_stray && !elsewhere[*at]);
            let keys: Vec<(Key, bool)> = its.iter().map(key).collect();
            let stored = self.send_all(&target, namespace, &keys);
            for (at, stored) in its.into_iter().zip(stored) {
                elsewhere[at] |= stored;
                pass.moved += u64::from(stored);
                pass.left += u64::from(!stored && wanted[at].1.is_own);
            }
        }
        wanted.retain(|(_, homes)| homes.is_stray);
        pass.left += self.let_go(namespace, &wanted, changes);
    }

    /// Lets go of blocks that all their homes keep; how many they do not.
    fn let_go(&self, namespace: NamespaceId, strays: &[(Key, Homes)], changes: u64) -> u64 {
        let share = &self.common.share;
        // As they are now: what is put here from here on stays.
        let held = strays.iter().map(|(key, _)| share.hold(namespace, *key));
        let held: Vec<Option<Own>> = held
            .map(|place| place.map(|place| Own::new(share, place)))
            .collect();
        let mut lacks: Vec<usize> = strays.iter().map(|(_, homes)| homes.far.len()).collect();
        for (target, its) in by_target(strays) {
            let keys = Keys::new(namespace, its.iter().map(|at| strays[*at].0));
            let keeps = flags(&target, &Ask::Keeps(keys), its.len()).unwrap_or_default();
            for (at, keeps) in its.into_iter().zip(keeps) {
                lacks[at] -= usize::from(keeps);
            }
        }
        let left = lacks.iter().filter(|lacks| **lacks > 0).count();
        let gone = held
            .iter()
            .zip(&lacks)
            .filter(|(_, lacks)| **lacks == 0)
            .filter_map(|(own, _)| Some(own.as_ref()?.place().token));
        let gone: Vec<Token> = gone.collect();
        if !gone.is_empty() {
            let hosts = &self.common.hosts;
            // Whoever was told meanwhile that this host keeps them may have let go of theirs.
            share.leave(&gone, || hosts.changes() == changes);
        }
        left as u64
    }

    /// Sends blocks to a host, as many at a time as go together: whether each is there now.
    fn send_all(
        &self,
        target: &Arc<Target>,
        namespace: NamespaceId,
        keys: &[(Key, bool)],
    ) -> Vec<bool> {
        let mut stored = Vec::new();
        while stored.len() < keys.len() && !target.is_down() {
            let begun = Instant::now();
            stored.extend(self.send(target, namespace, &keys[stored.len()..]));
            if !self.rest(begun.elapsed()) {
                break;
            }
        }
        if stored.contains(&true)
            && let Ok(texts) = self.common.share.arena().descriptions()
            && let Some((_, text)) = texts.into_iter().find(|(id, _)| *id == namespace)
        {
            let namespace = namespace.0;
            // Or it does not know what they are.
            let _told = target.hear(&Ask::Describe { namespace, text });
        }
        stored.resize(keys.len(), false);
        stored
    }

    /// Sends the first of some blocks to a host: whether each is there now. Those with `true` may
    /// take others' room there.
    fn send(
        &self,
        target: &Arc<Target>,
        namespace: NamespaceId,
        keys: &[(Key, bool)],
    ) -> Vec<bool> {
        let share = &self.common.share;
        let (mut bytes, mut count) = (0, 0);
        let (mut at, mut owns, mut blocks) = (Vec::new(), Vec::new(), Vec::new());
        for (key, evict) in keys {
            let own = share
                .hold(namespace, *key)
                .map(|place| Own::new(share, place));
            bytes += own.as_ref().map_or(0, |own| own.place().len);
            if bytes > BATCH_BYTES && count > 0 {
                break;
            }
            if let Some(own) = own {
                at.push(count);
                blocks.push(block_of(own.place(), *evict));
                owns.push(own);
            }
            count += 1;
        }
        let mut stored = vec![false; count];
        if blocks.is_empty() {
            return stored;
        }
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
            match room {
                Ok((Copy::There(its), Some(remote))) => {
                    whose.push(at);
                    far.push(its);
                    going.push((own, remote));
                }
                // Somebody was first.
                Err(Why::Present) => stored[at] = true,
                _ => {}
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
        let mut whole = vec![true; done.len()];
        let (mut whose, mut requests) = (Vec::new(), Vec::new());
        for (number, (own, remote)) in going.iter().enumerate() {
            let place = own.place();
            let Ok(buffers) = share.buffers(place, 0, place.len) else {
                whole[number] = false;
                continue;
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
            timeout: TIMEOUT,
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
        for (number, status) in whose.into_iter().zip(task.statuses()) {
            whole[number] &= status == Status::Done;
        }
        drop(task);
        let place = |number: usize| going[number].0.place();
        let sent = (0..done.len()).filter(|number| whole[*number]);
        // What is removed from here on waits until it is known whether it is there.
        let moving = share
            .moving
            .begin(sent.clone().map(|number| place(number).identity));
        let is_going = |at: &usize| moving.has(&place(*at).identity) && share.is_there(place(*at));
        let all: Vec<usize> = sent.filter(is_going).collect();
        if all.is_empty() {
            return done;
        }
        let written = |number: &usize| Written {
            id: far[*number].id,
            checksum: place(*number).checksum.0,
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
        stamp: 0,
    }
}
