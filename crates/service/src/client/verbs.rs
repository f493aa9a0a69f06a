//! The verbs of a depot, as calls of its client.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvdepot_arena::parts::Parts;
use kvdepot_arena::{Class, Error, Identity, Key, NamespaceId, Opening, Place, clock, parts};
use kvdepot_host::dir::Access;
use kvdepot_media::Checksum;
use kvdepot_store::placement::Holder;
use kvdepot_store::{
    About, BlockBuffers, BlockPage, Cursor, DeviceStats, DrainTo, Drained, GetOptions, Gone,
    NamespaceUsage, NoRoom, Op, Outside, Pin, Reservation, Stats, Task, Together, Verbs,
};
use zerocopy::little_endian::U32;

use crate::client::Client;
use crate::client::dial::Told;
use crate::client::groups::Declared;
use crate::client::link::Link;
use crate::frame::Out;
use crate::frame::refusal::{broken, tier_name};
use crate::frame::rows::{NameRow, Rows, marked};
use crate::frame::verbs::{self as say, Grant};

/// A block of a grant: its tier, its place, and its file if it has one.
type Granted = (usize, Place, Option<Outside>);

/// How long closing waits for what the owner has to do for it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(60);

/// Pause between two looks of a drain.
const DRAIN_SLICE: Duration = Duration::from_millis(50);

impl Client {
    /// The link that these were made by, and those of them that it knows.
    fn current<T>(
        &self,
        all: &[T],
        holder: impl Fn(&T) -> Holder,
    ) -> Option<(Arc<Link>, Vec<usize>)> {
        let link = self.dial.link()?;
        let mine = (0..all.len()).filter(|at| holder(&all[*at]) == link.mover.holder);
        let mine: Vec<usize> = mine.collect();
        (!mine.is_empty()).then_some((link, mine))
    }

    /// Tells each owner of those pins or reservations that it gave that they have ended.
    fn tell_ends(
        &self,
        mut ended: Vec<(Holder, NameRow)>,
        say: impl Fn(Rows<'static, NameRow>) -> Out,
    ) {
        while let Some((whose, _)) = ended.first().copied() {
            let mine = ended.extract_if(.., |(of, _)| *of == whose);
            self.dial
                .tell(whose, say(mine.map(|(_, name)| name).collect()));
        }
    }
}

impl Verbs for Client {
    fn about(&self) -> &About {
        &self.about
    }

    fn is_served(&self) -> bool {
        true
    }

    /// Whether somebody serves at the socket, as far as is known.
    fn is_connected(&self) -> bool {
        !self.gate.forked() && self.dial.is_live()
    }

    fn is_busy(&self) -> bool {
        true
    }

    fn socket(&self) -> Option<PathBuf> {
        Some(self.dial.socket().into())
    }

    fn describe(
        &self,
        id: NamespaceId,
        description: &str,
        salt: Option<&str>,
    ) -> Result<(), Error> {
        let salt = salt.map(str::to_owned);
        self.tell_all(&Told::Description(id, description.to_owned(), salt))
    }

    fn populate_aside(&self) -> Result<(), Error> {
        match self.dial.link() {
            Some(link) => link.mover.populate_aside(),
            None => Ok(()),
        }
    }

    /// Without an owner those of an empty depot with the same tiers.
    fn stats(&self) -> Stats {
        let empty = || Stats::empty(&self.about.tiers);
        let asked = self.ask(empty, &say::Stats {}, |stats, _| Ok(stats.0));
        asked.unwrap_or_else(|_| empty())
    }

    fn namespaces(&self) -> Result<Vec<NamespaceUsage>, Error> {
        let mut all: Vec<NamespaceUsage> = Vec::new();
        loop {
            let after = all.last().map(|one| one.id);
            let page = self.ask(Vec::new, &say::Namespaces { after }, |page, _| Ok(page))?;
            if page.is_empty() {
                return Ok(all);
            }
            all.extend(page.into_iter().map(|one| NamespaceUsage {
                id: one.namespace,
                description: one.description,
                blocks: one.blocks,
                bytes: one.bytes,
            }));
        }
    }

    fn gone(&self, limit: usize) -> Result<Gone, Error> {
        let limit = limit as u64;
        let heard = self.ask(
            || None,
            &say::Gone { limit },
            |left, link| {
                let mut listening = self.listening.lock();
                Ok(Some(listening.hear(link.mover.holder, &left)))
            },
        );
        if !matches!(heard, Ok(Some(_))) {
            self.listening.lock().miss();
        }
        heard.map(Option::unwrap_or_default)
    }

    /// False also where there is no owner, and once after puts were dropped with one.
    fn drain(&self, timeout: Duration) -> bool {
        let deadline = clock::now().checked_add(timeout);
        loop {
            let left = deadline.map_or(DRAIN_SLICE, |deadline| {
                deadline.saturating_duration_since(clock::now())
            });
            let millis = left.min(DRAIN_SLICE).as_millis() as u64;
            match self.ask(|| None, &say::Drain { millis }, |done, _| Ok(Some(done))) {
                Ok(Some(true)) => return self.stores.drained(),
                Ok(None) | Err(_) => return false,
                Ok(Some(false)) if left.is_zero() => return false,
                Ok(Some(false)) => {}
            }
        }
    }

    fn keep(&self) {}

    /// Refuses new calls, waits for what is under way, and takes leave. The owner goes on.
    fn close(&self) {
        if self.gate.forked() {
            return;
        }
        let Some(_closing) = self.gate.close() else {
            return;
        };
        let link = self.dial.end();
        if !self.gate.wait_empty(CLOSE_TIMEOUT) {
            tracing::warn!(
                "server did not finish the tasks of this process in time; the tasks have failed"
            );
        }
        link.iter().for_each(|link| link.mover.close());
        self.dial.take_leave(link);
        // What was given up ends when the lanes have stopped.
        self.gate.wait_empty(Duration::MAX);
    }

    fn devices(&self) -> Result<Vec<DeviceStats>, Error> {
        match self.change_slowly(&say::Devices {}, |devices| devices.0) {
            // As an empty depot answers.
            Err(Error::Peer { .. }) => Ok(Vec::new()),
            answer => answer,
        }
    }

    fn add_device(&self, path: &Path, capacity: Option<u64>) -> Result<Opening, Error> {
        let path = &*path.to_string_lossy();
        self.change_slowly(&say::AddDevice { path, capacity }, |opening| opening.0)
    }

    fn drain_device(&self, path: &Path, to: DrainTo, patience: Duration) -> Result<Drained, Error> {
        let call = say::DrainDevice {
            path: &path.to_string_lossy(),
            to_others: to == DrainTo::Others,
            patience_ms: millis(patience),
        };
        self.change_slowly(&call, |drained| drained.0)
    }

    fn remove_device(&self, path: &Path, force: bool, patience: Duration) -> Result<(), Error> {
        let call = say::RemoveDevice {
            path: &path.to_string_lossy(),
            force,
            patience_ms: millis(patience),
        };
        self.change_slowly(&call, |()| ())
    }

    fn grow_device(&self, path: &Path, capacity: u64) -> Result<(), Error> {
        let path = &*path.to_string_lossy();
        self.change_slowly(&say::GrowDevice { path, capacity }, |()| ())
    }

    fn lookup(&self, namespace: NamespaceId, keys: &[Key]) -> Result<Task, Error> {
        let asked = say::Lookup {
            namespace,
            keys: keys.into(),
        };
        // An owner that refuses a task answers nothing, and nothing would be there.
        let count = asked.keys.allowed()?.len();
        self.start_plain("lookup", &asked, namespace, count)
    }

    fn contains(&self, namespace: NamespaceId, keys: &[Key]) -> Result<Vec<bool>, Error> {
        if let Some(limit) = self.about.lookup_timeout {
            return self.wait_for(&self.lookup(namespace, keys)?, limit);
        }
        let count = keys.len();
        let keys = keys.into();
        self.ask(
            || vec![false; count],
            &say::Contains { namespace, keys },
            |found, _| {
                check_count(found.len(), count)?;
                Ok(found.iter().map(|found| *found != 0).collect())
            },
        )
    }

    fn prefix(&self, namespace: NamespaceId, keys: &[Key]) -> Result<usize, Error> {
        if self.about.lookup_timeout.is_some() {
            let found = self.contains(namespace, keys)?;
            return Ok(found.into_iter().take_while(|found| *found).count());
        }
        let keys = keys.into();
        let call = say::Prefix { namespace, keys };
        self.ask(|| 0, &call, |count, _| Ok(count as usize))
    }

    fn nearest(&self, namespace: NamespaceId, keys: &[Key]) -> Result<Vec<Option<usize>>, Error> {
        let count = keys.len();
        let keys = keys.into();
        self.ask(
            || vec![None; count],
            &say::Nearest { namespace, keys },
            |tiers, _| {
                check_count(tiers.len(), count)?;
                Ok(tiers.iter().copied().map(marked).collect())
            },
        )
    }

    fn acknowledged(
        &self,
        namespace: NamespaceId,
        keys: &[Key],
    ) -> Result<Vec<Option<u64>>, Error> {
        if self.about.ack.is_none() {
            return Err(self.fails("its release does not support `acknowledged`"));
        }
        let call = say::Acknowledged {
            namespace,
            keys: keys.into(),
        };
        self.ask(
            || vec![None; keys.len()],
            &call,
            |lens, _| {
                check_count(lens.len(), keys.len())?;
                Ok(lens.iter().map(|len| len.get().checked_sub(1)).collect())
            },
        )
    }

    fn put(
        &self,
        id: NamespaceId,
        after: Option<Key>,
        keys: Vec<Key>,
        buffers: BlockBuffers,
    ) -> Result<Task, Error> {
        let how = (Op::Put, GetOptions::default(), after);
        self.start(how, id, keys, buffers)
    }

    fn get(
        &self,
        id: NamespaceId,
        keys: Vec<Key>,
        buffers: BlockBuffers,
        options: GetOptions,
    ) -> Result<Task, Error> {
        self.start((Op::Get, options, None), id, keys, buffers)
    }

    fn prefetch(&self, id: NamespaceId, keys: &[Key]) -> Result<Task, Error> {
        let asked = say::Prefetch {
            namespace: id,
            keys: keys.into(),
        };
        self.start_plain("prefetch", &asked, id, keys.len())
    }

    fn remove(&self, namespace: NamespaceId, keys: &[Key]) -> Result<usize, Error> {
        let keys = keys.into();
        self.change(&say::Remove { namespace, keys }, |count| count as usize)
    }

    fn clear(&self, namespace: NamespaceId) -> Result<usize, Error> {
        self.change(&say::Clear { namespace }, |count| count as usize)
    }

    fn block_page(
        &self,
        namespace: NamespaceId,
        from: Option<Cursor>,
        limit: usize,
    ) -> Result<BlockPage, Error> {
        let call = say::Blocks {
            namespace,
            from: from.map(Cursor::to_bytes),
            limit: limit as u64,
        };
        self.ask(BlockPage::default, &call, |page, _| {
            let blocks = page.blocks.iter().map(|row| (row.key, row.bytes.get()));
            Ok(BlockPage {
                blocks: blocks.collect(),
                next: page.next.as_ref().map(Cursor::from_bytes),
            })
        })
    }

    fn group(
        &self,
        id: NamespaceId,
        keys: &[Key],
        class: Class,
    ) -> Result<Box<dyn Together>, Error> {
        Ok(Box::new(Declared::new(self, id, keys, class)?))
    }

    fn reserve(
        &self,
        namespace: NamespaceId,
        after: Option<Key>,
        blocks: &[(Key, Vec<u64>)],
        no_room: NoRoom,
    ) -> Result<Vec<Option<Reservation>>, Error> {
        for (_, lens) in blocks {
            parts::check(lens)?;
        }
        let keys: Vec<Key> = blocks.iter().map(|(key, _)| *key).collect();
        let lens = blocks.iter().flat_map(|(_, lens)| lens);
        let call = say::Reserve {
            namespace,
            after: after.map(|key| key.0),
            no_room: no_room as u8,
            keys: keys.as_slice().into(),
            parts: blocks.iter().map(|(_, lens)| count(lens)).collect(),
            lens: lens.map(|len| (*len).into()).collect(),
        };
        let read = |grant: Grant<'_>, link: &Link| {
            // With `Stop` it may end early.
            let granted = places(&grant, namespace, &keys)?.into_iter();
            let reserved = granted.zip(blocks).map(|(granted, (_, lens))| {
                let (tier, place, file) = granted?;
                let holder = link.mover.holder;
                Some(Reservation::elsewhere(holder, tier, place, lens).outside(file))
            });
            Ok(reserved.collect())
        };
        self.ask(|| vec![None; blocks.len()], &call, read)
    }

    fn commit(
        &self,
        reservations: &[Reservation],
        checksums: &[Vec<Checksum>],
    ) -> Result<Vec<bool>, Error> {
        for (reservation, checksums) in reservations.iter().zip(checksums) {
            reservation.check(checksums)?;
        }
        let _pass = self.gate.enter()?;
        let mut stored = vec![false; reservations.len()];
        let Some((link, mine)) = self.current(reservations, |one| one.holder) else {
            // The owner may only be away.
            self.abort(reservations);
            return Ok(stored);
        };
        let sums = mine.iter().flat_map(|at| &checksums[*at]);
        let call = say::Commit {
            names: mine.iter().map(|at| name_of(&reservations[*at])).collect(),
            parts: mine.iter().map(|at| count(&checksums[*at])).collect(),
            checksums: sums.map(|sum| sum.0).collect(),
        };
        let committed = link.call(&call, |stored| {
            check_count(stored.len(), mine.len())?;
            Ok(stored.iter().map(|stored| *stored != 0).collect::<Vec<_>>())
        });
        if committed.is_err() {
            // If the owner heard of the commit after all, there is nothing left of them.
            self.abort(reservations);
        }
        let committed = match committed {
            Err(Error::Interrupted) => return Err(Error::Interrupted),
            // An owner that is gone has published what it has: the next one tells.
            other => other.unwrap_or_default(),
        };
        for (at, committed) in mine.iter().zip(committed) {
            stored[*at] = committed;
        }
        if self.about.tiers.len() > 1 && stored.contains(&true) {
            self.stores.commit();
        }
        Ok(stored)
    }

    fn abort(&self, reservations: &[Reservation]) {
        if self.gate.forked() {
            return;
        }
        let ended = reservations.iter().map(|one| (one.holder, name_of(one)));
        self.tell_ends(ended.collect(), |names| Out::new(&say::Abort { names }));
    }

    fn pin(
        &self,
        namespace: NamespaceId,
        keys: &[Key],
        prefix: bool,
    ) -> Result<Vec<Option<Pin>>, Error> {
        let call = say::Pin {
            namespace,
            prefix,
            keys: keys.into(),
        };
        let read = |grant: Grant<'_>, link: &Link| {
            check_count(grant.tiers.len(), keys.len())?;
            let mut unread = Vec::new();
            let mut pin = |(tier, place, file): Granted| {
                // The owner has looked at the table; a medium that this process cannot read is a
                // miss.
                let parts = parts::single(&place).or_else(|| {
                    let reached = link.mover.reach(&place, file.as_ref(), Access::Read)?;
                    let found = reached.ends().parts(&place).ok()?;
                    found.map(Parts::from)
                });
                if parts.is_none() {
                    unread.push(NameRow::from((tier, place.token)));
                }
                let name = self.about.tiers.get(tier).map_or("", String::as_str);
                let tier = (tier, tier_name(name));
                parts.map(|parts| Pin::new(link.mover.holder, tier, place, parts).outside(file))
            };
            let granted = places(&grant, namespace, keys)?.into_iter();
            let pins = granted.map(|granted| granted.and_then(&mut pin)).collect();
            if !unread.is_empty() {
                let names = unread.as_slice().into();
                let served = false;
                let end = Out::new(&say::Unpin { served, names });
                self.dial.tell(link.mover.holder, end);
            }
            Ok(pins)
        };
        self.ask(|| vec![None; keys.len()], &call, read)
    }

    fn unpin(&self, pins: &[Pin], served: bool) {
        if self.gate.forked() {
            return;
        }
        let ended = pins.iter().map(|pin| (pin.holder, name_of_pin(pin)));
        self.tell_ends(ended.collect(), |names| {
            Out::new(&say::Unpin { served, names })
        });
    }

    fn discard(&self, pins: &[Pin]) -> usize {
        let Ok(_pass) = self.gate.enter() else {
            return 0;
        };
        let Some((link, mine)) = self.current(pins, |pin| pin.holder) else {
            return 0;
        };
        let call = say::Discard {
            names: mine.iter().map(|at| name_of_pin(&pins[*at])).collect(),
        };
        let count = link.call(&call, |count| Ok(count as usize));
        count.unwrap_or(0)
    }
}

/// How many parts there are.
fn count<T>(of: &[T]) -> U32 {
    (of.len() as u32).into()
}

fn millis(patience: Duration) -> u64 {
    patience.as_millis().try_into().unwrap_or(u64::MAX)
}

fn name_of(reservation: &Reservation) -> NameRow {
    (reservation.tier, reservation.place.token).into()
}

fn name_of_pin(pin: &Pin) -> NameRow {
    (pin.tier, pin.place.token).into()
}

/// An answer for each key.
fn check_count(answers: usize, keys: usize) -> Result<(), Error> {
    match answers == keys {
        true => Ok(()),
        false => Err(broken(format!("{answers} results for {keys} keys"))),
    }
}

/// Tier and place of each key, and its file if it has one, as far as the grant goes.
fn places(
    grant: &Grant<'_>,
    namespace: NamespaceId,
    keys: &[Key],
) -> Result<Vec<Option<Granted>>, Error> {
    let mut rows = grant.places.iter().zip(grant.files.each());
    let place = |(mark, key): (&u8, &Key)| {
        let Some(tier) = marked(*mark) else {
            return Ok(None);
        };
        let key = *key;
        let (row, file) = rows
            .next()
            .ok_or_else(|| broken("a tier without a placement"))?;
        let place = row.of(Identity { namespace, key }, file.as_ref())?;
        Ok(Some((tier, place, file)))
    };
    grant.tiers.iter().zip(keys).map(place).collect()
}
