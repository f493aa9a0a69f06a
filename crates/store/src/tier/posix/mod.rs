//! The tier `Posix`: one file a block in a directory of any file system, which any number of
//! processes and hosts share without a server. `Ds3fs` is the same on a 3FS, whose rings carry the
//! bytes.
//!
//! Guarantees: a block is written once, where nobody looks for it, and published whole by one
//! rename or link; what a file does not prove to be, by its header and its length, is a miss; no
//! more than the capacity is in use, whoever writes. A pin is an open file: removal takes the name
//! alone.
//!
//! `folder` says what lies where, `agree` what all have to name alike, `usage` counts for all,
//! `collect` makes room, `filter` knows what was looked at lately, `losses` what has gone,
//! `uses` when blocks were used, `described` what namespaces are, `pinned` holds what is pinned
//! until somebody is told, `desk` has the threads that wait for the file system, and `blocks` what
//! they do there.

mod agree;
mod blocks;
mod collect;
mod described;
mod desk;
mod folder;
mod losses;
pub(super) mod name;
mod open;
mod options;
mod pinned;
mod reach;
mod usage;
mod uses;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use kvdepot_arena::format::file_header::LEN;
use kvdepot_arena::{
    Departed, Durability, Error, Identity, Key, NamespaceId, Place, Refused, Reserved, TierStats,
    Wanted, clock, size,
};
use kvdepot_host::EachMinute;
use kvdepot_media::{Checksum, is_simulated};
use parking_lot::Mutex;

use super::contract::{Ends, NamespacePage, Page, Terms, Tier};
use super::description::encode;
use super::eviction_limit::EvictionLimit;
use super::file::BlockFile;
use super::filter::{Filter, unknown};
use super::identities;
use super::kinds::TierKind;
use super::late::{Progress, Reply};
use blocks::Common;
use collect::Collector;
use desk::{Desk, Threads, each};
use folder::Folder;
use losses::{Losses, Why};
use name::room_of;
use open::Open;
use options::Options;
use pinned::Pinned;
use usage::Usage;
use uses::Uses;

/// Threads that wait for the file system: so many files are opened at a time, and so many made.
const THREADS: usize = 8;

/// Threads that wait for a disk or a server: a step of a call may have all of them.
const WAITING: Threads = Threads {
    all: THREADS,
    call: THREADS,
    unawaited: THREADS / 2,
};

/// Threads that make files on a file system of this host without a sync, and compute most of that
/// time: those of one step of a call would take the processors from others.
const COMPUTING: Threads = Threads {
    all: THREADS,
    call: THREADS / 2,
    unawaited: 1,
};

/// Keys that one thread takes at a time: to be looked for, to be opened, to be made or published.
const LOOKS: usize = 64;
const OPENS: usize = 8;
const MAKES: usize = 4;

/// Steps of calls that may have files open at a time, at least: four for pins and reservations that
/// last, five for gets and puts of clients, four for promotions, two for write-back.
const STEPS: usize = 16;

/// How long a close waits for a file system that may hang: all of it ends within a second.
const TO_CLOSE: Duration = Duration::from_millis(900);

/// The kind `Posix`, with its section.
#[must_use]
pub(super) fn kind() -> TierKind {
    TierKind {
        name: "Posix",
        options: options::POSIX,
        check: |section, _| Options::posix(section).map(drop),
        open: Arc::new(|section, terms| {
            let tier = Posix::new(&Options::posix(section)?, terms)?;
            Ok(Arc::new(tier) as Arc<dyn Tier>)
        }),
    }
}

/// The kind `Ds3fs`: the same on a 3FS, whose rings carry the bytes.
#[must_use]
pub(super) fn kind_of_3fs() -> TierKind {
    TierKind {
        name: "Ds3fs",
        options: options::DS3FS,
        check: |section, _| Options::ds3fs(section).map(drop),
        open: Arc::new(|section, terms| {
            let tier = Posix::new(&Options::ds3fs(section)?, terms)?;
            Ok(Arc::new(tier) as Arc<dyn Tier>)
        }),
    }
}

/// The tier.
struct Posix {
    /// What is looked for and read does not wait for what is written.
    reads: Arc<Desk>,
    writes: Arc<Desk>,
    common: Arc<Common>,
}

impl Posix {
    fn new(options: &Options, terms: Terms) -> Result<Posix, Error> {
        let folder = Arc::new(Folder::open(options)?);
        let tier = Posix::of(&folder, options, terms);
        if tier.is_err() {
            folder.close();
        }
        tier
    }

    fn of(folder: &Arc<Folder>, options: &Options, terms: Terms) -> Result<Posix, Error> {
        let capacity = agree::agree(folder, options.capacity, options.fan_out)?;
        let usage = Arc::new(Usage::open(&folder.dir(), capacity)?);
        let filter = Arc::new(Filter::default());
        let losses = Arc::new(Losses::new(&filter));
        let uses = Arc::new(Uses::new());
        let collector = Collector::start(folder, &usage, (&losses, &uses))?;
        let waits = folder.is_far() || options.durability == Durability::Power;
        let writers = if waits { WAITING } else { COMPUTING };
        let writes = Arc::new(Desk::new("write", writers)?);
        // So that a put is refused, and not silent, where no space is freed in time.
        let (number, for_space) = (terms.number, terms.timeout / 2);
        let is_last = terms.is_last;
        let marks = (folder, &usage, &losses, &uses);
        let open = Open::new(terms, marks, &writes, options)?;
        Ok(Posix {
            reads: Arc::new(Desk::new("read", WAITING)?),
            writes,
            common: Arc::new(Common {
                name: options.name,
                number,
                durability: options.durability,
                folder: Arc::clone(folder),
                usage,
                collector,
                filter,
                losses,
                open,
                for_space,
                limit: EvictionLimit::new(is_last, |len| room_of(LEN as u64 + len)),
                stored: Default::default(),
                refusals: EachMinute::default(),
                failed_reads: EachMinute::default(),
                full: AtomicU64::new(0),
            }),
        })
    }
}

/// Does `work`, and reports each time that there is progress.
fn noting<I, T>(progress: Progress, work: impl Fn(I) -> T) -> impl Fn(I) -> T {
    move |item| {
        progress.begins();
        let came = work(item);
        progress.made();
        came
    }
}

/// Answers how many are gone.
fn count_of(reply: Reply<usize>) -> impl FnOnce(Vec<bool>) + Send {
    |gone| {
        reply.answer(gone.into_iter().filter(|gone| *gone).count());
    }
}

impl Tier for Posix {
    fn name(&self) -> &'static str {
        self.common.name
    }

    fn lasts(&self) -> bool {
        true
    }

    fn block_max(&self) -> u64 {
        self.common.block_max()
    }

    /// A part of the files that may be open: a call that waits for all of them would wait for the
    /// last pin that anybody holds.
    fn step_max(&self) -> usize {
        (self.common.open.slots.most() / STEPS).max(1)
    }

    fn probe(&self, namespace: NamespaceId, keys: &[Key], reply: Reply<Vec<bool>>) {
        let names = identities(namespace, keys);
        let (known, turn) = self.common.filter.of(names.iter().copied());
        let (asked, told) = unknown(names, known);
        let asked: Vec<(usize, Identity)> = asked.into_iter().enumerate().collect();
        if asked.is_empty() {
            reply.asks_nobody();
        }
        reply.in_turn(self.reads.pulse());
        let parts = reply.in_parts(asked.len(), told.clone());
        let look = {
            let (common, parts) = (Arc::clone(&self.common), parts.clone());
            move |(at, name): (usize, Identity)| {
                let is_there = common.has(&name);
                let found = is_there.then_some(());
                common
                    .filter
                    .note_answers(std::iter::once((name, found)), turn);
                parts.note(at, is_there);
            }
        };
        each(&self.reads, (asked, LOOKS), look, move |_: Vec<()>| {
            reply.answer_parts(|| told(parts.take()));
        });
    }

    fn pin(
        &self,
        namespace: NamespaceId,
        keys: &[Key],
        used: &[u64],
        reply: Reply<Vec<Option<Place>>>,
    ) {
        let names = identities(namespace, keys);
        let open = &self.common.open;
        let used = names.iter().copied().zip(used.iter().copied());
        let used = open.note_used(used);
        let (common, reads) = (Arc::clone(&self.common), Arc::clone(&self.reads));
        let count = names.len();
        let refusal = move || vec![None; count];
        let slots = &self.common.open.slots;
        slots.acquire((0, count), reply, refusal, move |reply, permits| {
            let told = |found: Vec<Option<Option<Pinned>>>| {
                let found = found.into_iter().map(Option::flatten);
                found.map(|one| one.and_then(Pinned::hand_out)).collect()
            };
            reply.in_turn(reads.pulse());
            let parts = reply.in_parts(count, told);
            let permits = Mutex::new(permits);
            let find = {
                let parts = parts.clone();
                move |(at, name): (usize, Identity)| {
                    let slot = permits.lock().take();
                    let used = used.get(at).copied();
                    let found = slot.and_then(|slot| common.find(&name, used, slot));
                    parts.note(at, found);
                }
            };
            let names = names.into_iter().enumerate().collect();
            each(&reads, (names, OPENS), find, move |_: Vec<()>| {
                reply.answer_parts(|| told(parts.take()));
            });
        });
    }

    fn note_used(&self, namespace: NamespaceId, used: &[(Key, u64)]) {
        let named = used.iter().map(|(key, stamp)| {
            (
                Identity {
                    namespace,
                    key: *key,
                },
                *stamp,
            )
        });
        drop(self.common.open.note_used(named));
    }

    fn unpin(&self, places: &[Place]) {
        self.common.open.unpin(places);
    }

    fn discard(&self, places: &[Place], reply: Reply<usize>) {
        // Open files: no other gets their numbers meanwhile.
        let files = places.iter().filter_map(|place| {
            let file = self.common.open.file_of(place).ok()?;
            Some((place.identity, file))
        });
        let files: Vec<_> = files.collect();
        if files.is_empty() {
            reply.asks_nobody();
        }
        let common = Arc::clone(&self.common);
        let remove = move |(name, file): (Identity, Arc<BlockFile>)| {
            common.remove(&name, Some(file.inode()), Why::Rotten)
        };
        reply.in_turn(self.writes.pulse());
        let remove = noting(reply.progress(), remove);
        each(&self.writes, (files, MAKES), remove, count_of(reply));
    }

    fn reserve(
        &self,
        namespace: NamespaceId,
        blocks: &[Wanted],
        reply: Reply<Vec<Result<Reserved, Refused>>>,
    ) {
        self.common.note_sizes(blocks);
        let blocks = blocks.to_vec();
        let named = |wanted: &Wanted| {
            let key = wanted.key;
            (Identity { namespace, key }, wanted.stamp)
        };
        drop(self.common.open.note_used(blocks.iter().map(named)));
        let (common, writes) = (Arc::clone(&self.common), Arc::clone(&self.writes));
        let refusal = {
            let (common, blocks) = (Arc::clone(&common), blocks.clone());
            move || {
                let refused = blocks.iter().map(|wanted| Err(common.no_slot(wanted)));
                refused.collect()
            }
        };
        let slots = &self.common.open.slots;
        slots.acquire((0, blocks.len()), reply, refusal, move |reply, permits| {
            let permits = Mutex::new(permits);
            let finds = common.find_room(&blocks);
            let blocks: Vec<(Wanted, bool)> = blocks.into_iter().zip(finds).collect();
            let make = move |(wanted, finds_room)| {
                let slot = permits.lock().take();
                common.make(namespace, (&wanted, finds_room), slot)
            };
            reply.in_turn(writes.pulse());
            let question = reply.progress();
            let make = move |wanted| {
                question.begins();
                let made = make(wanted);
                // A refusal after a wait for space is no progress.
                if !matches!(made, Err(Refused::Full(_))) {
                    question.made();
                }
                made
            };
            each(&writes, (blocks, MAKES), make, move |answers| {
                reply.answer(answers);
            });
        });
    }

    fn commit(&self, written: Vec<(Reserved, Checksum)>, pinned: bool, reply: Reply<Vec<bool>>) {
        self.common.open.publishes(&written);
        reply.in_turn(self.writes.pulse());
        let (common, progress) = (Arc::clone(&self.common), reply.progress());
        let publish = move |(reserved, checksum): (Reserved, Checksum)| {
            let place = *reserved;
            let stored = common.publish(reserved, checksum, pinned);
            let pin = (stored && pinned).then(|| Pinned::new(&common.open, place));
            (stored, pin)
        };
        let done = |answers: Vec<(bool, Option<Pinned>)>| {
            let told = answers.into_iter().map(|(stored, pin)| {
                let _place = pin.and_then(Pinned::hand_out);
                stored
            });
            reply.answer(told.collect());
        };
        let publish = noting(progress, publish);
        each(&self.writes, (written, MAKES), publish, done);
    }

    fn remove(&self, namespace: NamespaceId, keys: &[Key], reply: Reply<Vec<bool>>) {
        self.common.open.forget_copies(namespace, Some(keys));
        let common = Arc::clone(&self.common);
        let remove = move |name| common.remove(&name, None, Why::Removed);
        reply.in_turn(self.writes.pulse());
        let remove = noting(reply.progress(), remove);
        let names = identities(namespace, keys);
        each(&self.writes, (names, MAKES), remove, move |gone| {
            reply.answer(gone);
        });
    }

    fn clear(&self, namespace: NamespaceId, reply: Reply<usize>) {
        self.common.open.forget_copies(namespace, None);
        let common = Arc::clone(&self.common);
        reply.in_turn(self.writes.pulse());
        self.writes.run(move || {
            let (mut count, progress) = (0, reply.progress());
            progress.begins();
            for number in 0..common.folder.folders() {
                let Ok(names) = common.names(number, namespace) else {
                    return;
                };
                progress.made();
                let remove = |name: &Identity| common.remove(name, None, Why::Removed);
                let gone = names.iter().map(noting(progress.clone(), remove));
                count += gone.filter(|gone| *gone).count();
            }
            common.filter.clear(namespace);
            reply.answer(count);
        });
    }

    /// A mark is the number of a folder.
    fn list(&self, namespace: NamespaceId, from: u64, limit: usize, reply: Reply<Page>) {
        let common = Arc::clone(&self.common);
        reply.in_turn(self.writes.pulse());
        self.writes.run(move || {
            let (mut page, progress) = (Vec::new(), reply.progress());
            progress.begins();
            let mut next = from as u32;
            while next < common.folder.folders() && page.len() < limit && progress.is_wanted() {
                let Ok(names) = common.names(next, namespace) else {
                    return;
                };
                progress.made();
                for name in names.iter().take_while(|_| progress.is_wanted()) {
                    let header = common.folder.header(name);
                    progress.made();
                    page.extend(header.map(|header| (name.key, header.len)));
                }
                next += 1;
            }
            let is_last = next >= common.folder.folders();
            reply.answer((page, (!is_last).then_some(u64::from(next))));
        });
    }

    fn describe(&self, namespace: NamespaceId, description: &str) {
        // Cut before it waits: a client may describe any number of namespaces at length.
        let (common, text) = (Arc::clone(&self.common), encode(description));
        self.writes.run(move || {
            let described = described::describe(&common.folder.dir(), namespace, &text);
            if let Err(error) = described {
                let path = common.folder.path.display();
                tracing::debug!(%error, %path, "cannot write the description of a namespace");
            }
        });
    }

    /// A mark is the number of a folder.
    fn namespaces(&self, from: u64, reply: Reply<NamespacePage>) {
        let common = Arc::clone(&self.common);
        reply.in_turn(self.writes.pulse());
        self.writes.run(move || {
            let progress = reply.progress();
            progress.begins();
            match common.shares(from as u32, &progress) {
                Ok(page) => {
                    reply.answer(page);
                }
                Err(error) => tracing::debug!(%error, "cannot list a directory"),
            }
        });
    }

    fn about(&self) -> String {
        let common = &self.common;
        let (capacity, path) = (common.usage.capacity(), common.folder.path.display());
        format!("{} {} at {path}", common.name, size::show(capacity))
    }

    fn departed(&self, listener: u64, limit: usize) -> Departed {
        self.common.losses.departed(listener, limit)
    }

    fn forget_listener(&self, listener: u64) {
        self.common.losses.forget(listener);
    }

    fn stats(&self) -> TierStats {
        let common = &self.common;
        let (used, capacity) = (common.usage.seen(), common.usage.capacity());
        let mut stats = TierStats::new(common.name);
        stats.capacity_bytes = capacity;
        stats.live_bytes = used;
        stats.free_bytes = capacity.saturating_sub(used);
        stats.largest_free_bytes = stats.free_bytes;
        (stats.pinned_blocks, stats.reserved_blocks) = common.open.counts();
        let (evicted, rotten) = common.losses.counts();
        (stats.evicted_blocks, stats.evicted_bytes) = evicted;
        stats.corrupt_blocks = rotten;
        stats.uncounted = true;
        stats.full = common.full.load(Ordering::Relaxed);
        stats.stored_blocks = common.stored[0].load(Ordering::Relaxed);
        stats.stored_bytes = common.stored[1].load(Ordering::Relaxed);
        stats
    }

    fn ends(&self) -> Arc<dyn Ends> {
        Arc::clone(&self.common.open) as _
    }

    fn close(&self) {
        let deadline = clock::now() + TO_CLOSE;
        self.reads.end(deadline);
        self.writes.end(deadline);
        self.common.collector.end(deadline);
        let (common, (done, closed)) = (Arc::clone(&self.common), mpsc::channel::<()>());
        let close = move || {
            common.open.close();
            common.usage.close();
            common.folder.close();
            drop(done);
        };
        if is_simulated() {
            return close();
        }
        // A file system that hangs is left alone. What has no thread is swept by others.
        let thread = std::thread::Builder::new().name("kvdepot-close".into());
        if thread.spawn(close).is_ok() {
            let _closed = closed.recv_timeout(deadline.saturating_duration_since(clock::now()));
        }
    }
}
