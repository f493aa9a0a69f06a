//! How a block becomes an object: memory is reserved for it, lanes write it, and `send` stores it.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use futures_util::future::{FutureExt, join_all};
use futures_util::stream::{self, StreamExt};
use kvdepot_arena::clock::unix_seconds;
use kvdepot_arena::format::file_header::{FileHeader, LEN, SUMS_MAX};
use kvdepot_arena::format::file_note::FileNote;
use kvdepot_arena::{Cause, Full, Identity, NamespaceId, Refused, Reserved, Use, Wanted, parts};
use kvdepot_media::Checksum;
use tokio::time::{Instant, timeout_at};

use super::bucket::Way;
use super::held::{Pinned, Written};
use super::object::{Found, Seen};
use super::send::Sent;
use super::usage::{BEGIN, END, Promise};
use super::{Common, NAME};

/// What one call waits for with this block.
#[derive(Clone, Copy)]
struct Patience {
    until: Instant,
    for_memory: bool,
    for_room: bool,
}

/// What a block needs in the bucket.
#[derive(Clone, Copy)]
struct Need {
    bytes: u64,
    /// Bytes of those behind it in its call, which are announced with it.
    beyond: u64,
    /// Whether others may be evicted for it.
    may_evict: bool,
}

impl Common {
    /// Makes room for blocks. Of memory a call waits for its first block alone: with more in its
    /// hands it would wait for itself. For room in the bucket it waits once: what there is none for
    /// then finds what was announced before. What is not made in time is declined.
    pub(super) async fn reserve(
        &self,
        namespace: NamespaceId,
        blocks: Vec<Wanted>,
    ) -> Vec<Result<Reserved, Refused>> {
        let name = |wanted: &Wanted| Identity {
            namespace,
            key: wanted.key,
        };
        let names: Vec<Identity> = blocks.iter().map(name).collect();
        let deadline = self.bucket.deadline();
        let looks = (0..blocks.len()).map(|at| {
            let (name, len) = (&names[at], blocks[at].len);
            async move {
                // Somebody may have removed what was found lately, and a put has to be right.
                let is_there = matches!(self.known(name), Some(Seen::Block(_)));
                match is_there || self.looks_first(LEN + len as usize) {
                    true => self.look(name, Way::Write).await,
                    false => Ok(Seen::Nothing),
                }
            }
            .boxed()
        });
        // As many as may be asked at a time: the others would wait within their time-out.
        let looks = stream::iter(looks.collect::<Vec<_>>()).buffered(self.bucket.at_once());
        let seen: Vec<_> = looks.collect().await;
        // For space that a collection frees, and for memory: half of what is left, so that the
        // block can be written as well.
        let now = Instant::now();
        let until = now + deadline.saturating_duration_since(now) / 2;
        let mut made: Vec<Result<Reserved, Refused>> = Vec::with_capacity(blocks.len());
        let needs = self.needs(&blocks);
        let prompts: Vec<u64> = blocks.iter().map(|one| Use::of(one.stamp).began).collect();
        let mut lacks_room = false;
        let blocks = blocks.iter().zip(needs);
        for ((block, name), seen) in blocks.zip(names.iter().copied()).zip(seen) {
            let patience = Patience {
                until,
                for_memory: !made.iter().any(Result::is_ok),
                for_room: !lacks_room,
            };
            let one = match seen {
                Ok(Seen::Block(_)) => Err(Refused::Present(self.held.nowhere())),
                Ok(Seen::Strange { newer: true, .. }) | Err(_) => Err(Refused::Declined),
                Ok(Seen::Nothing | Seen::Strange { .. }) => {
                    let make = self.make(block, name, patience);
                    let made = timeout_at(deadline, make).await;
                    made.unwrap_or(Err(Refused::Declined))
                }
            };
            lacks_room |= matches!(&one, Err(Refused::Full(_))) && Instant::now() >= until;
            made.push(one);
        }
        // What is there needs no room. Of a prompt, nothing is there behind the first block beyond
        // its limit that is not.
        let mut ended = HashSet::new();
        let mut full = made
            .iter()
            .enumerate()
            .filter_map(|(at, one)| match one {
                Err(Refused::Full(full)) => Some((at, full.cause == Cause::Limit)),
                _ => None,
            })
            .collect::<Vec<_>>()
            .into_iter();
        loop {
            let next = full.by_ref();
            let next = next.filter(|(at, is_limit)| !(*is_limit && ended.contains(&prompts[*at])));
            let some: Vec<_> = next.take(self.bucket.at_once()).collect();
            if some.is_empty() {
                break;
            }
            let looks = some
                .iter()
                .map(|(at, _)| self.look(&names[*at], Way::Write));
            for ((at, is_limit), seen) in some.iter().zip(join_all(looks).await) {
                if matches!(seen, Ok(Seen::Block(_))) {
                    made[*at] = Err(Refused::Present(self.held.nowhere()));
                } else if *is_limit {
                    ended.insert(prompts[*at]);
                }
            }
        }
        // Who would write a block uses the one that is there.
        let there = names.iter().zip(&made);
        let there = there.filter(|(_, one)| matches!(one, Err(Refused::Present(_))));
        self.note_uses(there.map(|(name, _)| *name));
        made
    }

    /// What each of these blocks, which are in prefix order, needs.
    fn needs(&self, blocks: &[Wanted]) -> Vec<Need> {
        let capacity = self.fleet.as_ref().map(|(usage, _)| usage.capacity());
        if let Some(capacity) = capacity {
            self.limit.note(capacity, blocks);
        }
        let mut beyond = 0;
        let needs = blocks.iter().rev().map(|wanted| {
            let bytes = LEN as u64 + wanted.len;
            let may_evict = capacity.is_none_or(|all| self.limit.allows(all, wanted));
            let need = Need {
                bytes,
                beyond,
                may_evict,
            };
            // The others may find no space.
            beyond += if may_evict { bytes } else { 0 };
            need
        });
        let mut needs: Vec<Need> = needs.collect();
        needs.reverse();
        needs
    }

    async fn make(
        &self,
        (wanted, need): (&Wanted, Need),
        name: Identity,
        patience: Patience,
    ) -> Result<Reserved, Refused> {
        let has_room = !self.held.has_keys() || usize::from(wanted.parts) <= SUMS_MAX;
        if !has_room || !self.held.proves(name.namespace) {
            // There would be no MACs, or no room for them.
            return Err(Refused::Declined);
        }
        let Some(making) = self.held.begin(name) else {
            return Err(Refused::Reserved(self.held.nowhere()));
        };
        let bytes = need.bytes;
        if wanted.len > self.block_max {
            let most = self.block_max;
            return Err(self.full(wanted.len, Cause::Large { most }));
        }
        if let Some(refused) = self.beyond_limit(need) {
            return Err(refused);
        }
        let until = patience.for_memory.then_some(patience.until);
        let Some(memory) = self.staging.take(bytes as usize, until).await else {
            if wanted.copy {
                // It stays where it is until others are sent.
                return Err(Refused::Reserved(self.held.nowhere()));
            }
            let (free, capacity) = (self.staging.free(), self.staging.capacity());
            return Err(self.full(wanted.len, Cause::Space { free, capacity }));
        };
        if wanted.parts > 1 {
            // Between parts are bytes that nobody writes.
            let page = [0; LEN];
            for at in (0..bytes).step_by(LEN) {
                let some = (bytes - at).min(LEN as u64) as usize;
                memory
                    .write(at, &page[..some])
                    .map_err(|_| Refused::Declined)?;
            }
        }
        let promise = self.promise(need, patience).await?;
        making
            .reserve((memory, promise), wanted)
            .ok_or(Refused::Declined)
    }

    /// Room in the bucket. A collection makes some, if others may be evicted for this.
    async fn promise(
        &self,
        need: Need,
        Patience {
            until, for_room, ..
        }: Patience,
    ) -> Result<Promise, Refused> {
        let Some((usage, collector)) = &self.fleet else {
            return Ok(Promise::nothing());
        };
        let Need {
            bytes,
            beyond,
            may_evict,
        } = need;
        let mut was_counted = false;
        loop {
            if let Some(refused) = self.beyond_limit(need) {
                return Err(refused);
            }
            let taken = match for_room {
                true => usage.take(bytes, beyond).await,
                false => Ok(usage.take_granted(bytes)),
            };
            match taken {
                Ok(Some(promise)) => {
                    if let Some(refused) = self.beyond_limit(Need { bytes: 0, ..need }) {
                        return Err(refused);
                    }
                    if usage.seen() >= usage.part(BEGIN) {
                        collector.wake();
                    }
                    return Ok(promise);
                }
                Ok(None) => {}
                Err(_) => return Err(Refused::Declined),
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || !for_room || (!may_evict && was_counted) {
                break;
            }
            // It counts where nobody has.
            let needed = if may_evict { bytes } else { 0 };
            collector.make_room(needed, left).await;
            was_counted = true;
        }
        let capacity = usage.capacity();
        let free = capacity.saturating_sub(usage.seen());
        Err(self.full(
            bytes - LEN as u64,
            match may_evict {
                true => Cause::Space { free, capacity },
                false => Cause::Limit,
            },
        ))
    }

    /// The refusal of a block that may evict no other and finds no spare room. Room that a
    /// collection would soon have to make is none.
    fn beyond_limit(&self, need: Need) -> Option<Refused> {
        let (usage, collector) = self.fleet.as_ref()?;
        let used = usage.seen().saturating_add(need.bytes);
        if need.may_evict || used <= usage.part(END) {
            return None;
        }
        // Much may have been removed since the last count.
        collector.doubt();
        Some(self.full(need.bytes.saturating_sub(LEN as u64), Cause::Limit))
    }

    fn full(&self, requested: u64, cause: Cause) -> Refused {
        self.full.fetch_add(1, Ordering::Relaxed);
        Refused::Full(Full {
            tier: NAME,
            requested,
            cause,
        })
    }

    /// Stores what is written; its pin, where it is stored and that was asked for.
    pub(super) async fn publish(
        &self,
        reserved: Reserved,
        checksum: Checksum,
        pinned: bool,
    ) -> Option<Option<Pinned>> {
        let Written {
            place,
            memory,
            promise,
            leaves,
            macs,
        } = self.held.take(reserved)?;
        let name = place.identity;
        let header = FileHeader {
            identity: name,
            len: place.len,
            parts: place.parts,
            checksum,
            created: unix_seconds().into(),
        };
        let note = FileNote {
            len: place.len,
            parts: place.parts,
            checksum,
            mac: macs.first().copied().filter(|_| place.parts == 1),
        };
        let proven = !self.held.has_keys() || macs.len() == usize::from(place.parts);
        let path = self.path_of(&name);
        let sent = match memory.write(0, &header.encode(&macs, &leaves)) {
            Ok(()) if proven && !self.held.is_removed(&place) => {
                let bytes = memory.into_bytes();
                let sent = self.send(&path, &name, &note, bytes.clone()).await;
                sent.map(|sent| (sent, bytes))
            }
            _ => {
                let _ended = self.held.published(&place, None);
                return None;
            }
        };
        let found = match &sent {
            Ok((Sent::Stored(e_tag), _)) => Some(Found {
                note,
                e_tag: e_tag.as_str().into(),
                macs: macs.into(),
            }),
            Ok((Sent::There { found, .. }, _)) => Some(found.clone()),
            _ => None,
        };
        // A pin is of these very bytes.
        let is_other = found.as_ref().is_some_and(|found| found.note != note);
        let object = match (&sent, found) {
            (Ok((_, bytes)), Some(found)) => {
                self.filter.note(name, Some(found.clone()));
                let table = match usize::from(place.parts) {
                    1 => Vec::new(),
                    count => {
                        let begin = bytes.len() - count * parts::ENTRY as usize;
                        bytes[begin..].to_vec()
                    }
                };
                let of_these = pinned && !is_other;
                of_these.then(|| self.object(name, (path.clone(), found), table))
            }
            _ => None,
        };
        let (is_stored, is_there) = match &sent {
            Ok((Sent::Stored(_), _)) => (true, true),
            Ok((Sent::There { .. }, _)) => (false, !(pinned && is_other)),
            Ok((Sent::Kept, _)) => (false, false),
            Err(fault) => {
                if let Some(unsaid) = self.bucket.may_say("put", *fault) {
                    tracing::warn!(?fault, unsaid, key = %name.key, "cannot store a block");
                }
                (false, false)
            }
        };
        match sent {
            Ok((Sent::Stored(_), _)) => promise.settle(),
            Ok((Sent::There { doubtful, .. }, _)) if !doubtful => drop(promise),
            Ok((Sent::There { .. } | Sent::Kept, _)) => promise.keep(),
            Err(fault) if fault.is_doubtful() => promise.keep(),
            Err(_) => drop(promise),
        }
        if let Some((usage, collector)) = &self.fleet
            && usage.is_unsaid()
        {
            collector.wake();
        }
        let Ok(pin) = self.held.published(&place, object) else {
            self.filter.note(name, None);
            let _gone = self.bucket.remove(&path).await;
            return None;
        };
        if is_stored {
            self.stored[0].fetch_add(1, Ordering::Relaxed);
            self.stored[1].fetch_add(place.len, Ordering::Relaxed);
        }
        is_there.then_some(pin)
    }
}
