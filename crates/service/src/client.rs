//! A depot that another process of this host serves.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvdepot_arena::gate::Gate;
use kvdepot_arena::parts::Parts;
use kvdepot_arena::patience::Limit;
use kvdepot_arena::{Error, Identity, Key, NamespaceId, Opening, Place, clock, parts};
use kvdepot_media::Checksum;
use kvdepot_store::placement::Holder;
use kvdepot_store::{
    About, BlockBuffers, BlockPage, Cursor, DeviceStats, DrainTo, Drained, GetOptions, Gone,
    Journal, NamespaceUsage, NoRoom, Op, Outcome, Pin, Reservation, Stats, Task, Verbs,
};
use parking_lot::Mutex;

use crate::calls::{about_names, give_back_pins, of_namespace, put_name, unpin};
use crate::departures::Listening;
use crate::dial::{Dial, Told};
use crate::frame::{self, In, Out, Verb};
use crate::link::{Call, Link, Stores};

/// How long closing waits for what the owner has to do for it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(60);

/// Longest wait for an answer where nobody has chosen another: calls are index work, of
/// milliseconds at most.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);

/// Pause between two looks of a drain.
const DRAIN_SLICE: Duration = Duration::from_millis(50);

/// This process's end.
pub(crate) struct Client {
    dial: Dial,
    about: About,
    stores: Arc<Stores>,
    gate: Arc<Gate>,
    pub(crate) listening: Mutex<Listening>,
}

impl Client {
    pub(crate) fn connect(
        socket: &Path,
        lanes: Option<usize>,
        timeout: Option<Duration>,
    ) -> Result<Arc<Client>, Error> {
        let gate = Gate::new()?;
        let limit = Arc::new(Limit::new(timeout.unwrap_or(TIMEOUT)));
        let stores = Arc::<Stores>::default();
        let (dial, link) = Dial::new(socket, lanes, Arc::clone(&limit), Arc::clone(&stores))?;
        let about = link.call(Out::new(Verb::About, 0), |body| body.json::<About>())?;
        if timeout.is_none() {
            about.timeout.iter().for_each(|owners| limit.set(*owners));
        }
        Ok(Arc::new(Client {
            dial,
            about,
            stores,
            gate,
            listening: Mutex::default(),
        }))
    }

    pub(crate) fn socket(&self) -> &Path {
        self.dial.socket()
    }

    /// Asks the owner what it has; `absent`, which is what an empty depot answers, when there is
    /// none.
    pub(crate) fn ask<T>(
        &self,
        absent: impl FnOnce() -> T,
        out: Out,
        read: impl FnOnce(&mut In<'_>, &Link) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let _pass = self.gate.enter()?;
        let Some(link) = self.dial.link() else {
            return Ok(absent());
        };
        match link.call(out, |body| read(body, &link)) {
            Err(Error::Closed(_)) => Ok(absent()),
            Err(error @ Error::Peer { .. }) => {
                tracing::warn!(%error, "a call was not answered");
                Ok(absent())
            }
            answer => answer,
        }
    }

    /// Has the owner change what it has.
    ///
    /// # Errors
    /// [`Error::Peer`] when there is none: nothing would be changed, and the next one may still
    /// have it.
    fn change<T>(
        &self,
        out: Out,
        read: impl FnOnce(&mut In<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let _pass = self.gate.enter()?;
        let link = self.dial.link().ok_or_else(|| self.nobody())?;
        link.call(out, read).map_err(|error| match error {
            Error::Closed(_) => self.nobody(),
            other => other,
        })
    }

    fn nobody(&self) -> Error {
        Error::Peer {
            socket: self.socket().display().to_string(),
            reason: "nobody serves there".into(),
        }
    }

    /// As [`Client::change`], for what may take long.
    pub(crate) fn ask_slowly<T>(
        &self,
        out: Out,
        read: impl FnOnce(&mut In<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let _pass = self.gate.enter()?;
        let link = self.dial.link().ok_or_else(|| self.nobody())?;
        let frame = link.ask_slowly(out)?.ok_or_else(|| self.nobody())?;
        let read = || frame::check(&frame).and_then(|()| read(&mut In(&frame.body)));
        read().map_err(|error| link.named(error))
    }

    /// Tells this owner, and each that follows.
    fn tell_all(&self, told: &Told) -> Result<(), Error> {
        self.dial.remember(told);
        self.ask(|| (), told.call(), |_, _| Ok(()))
    }

    fn namespaces_after(&self, after: Option<NamespaceId>) -> Result<Vec<NamespaceUsage>, Error> {
        let mut out = Out::new(Verb::Namespaces, 0);
        out.flag(after.is_some());
        after.iter().for_each(|after| out.bytes(&after.0));
        self.ask(Vec::new, out, |body, _| {
            let one = |body: &mut In<'_>| {
                let (id, blocks, bytes) = (body.namespace()?, body.long()?, body.long()?);
                let (described, text) = (body.flag()?, body.text()?);
                Ok(NamespaceUsage {
                    id,
                    description: described.then_some(text),
                    blocks,
                    bytes,
                })
            };
            (0..body.count(37)?).map(|_| one(body)).collect()
        })
    }

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
    fn tell_ends(&self, mut ended: Vec<(Holder, (usize, Place))>, head: impl Fn() -> Out) {
        while let Some((whose, _)) = ended.first().copied() {
            let mine = ended.extract_if(.., |(of, _)| *of == whose);
            let names: Vec<_> = mine.map(|(_, name)| name).collect();
            self.dial.tell(whose, about_names(head(), &names));
        }
    }

    fn start(
        &self,
        op: Op,
        id: NamespaceId,
        keys: Vec<Key>,
        buffers: BlockBuffers,
        options: GetOptions,
    ) -> Result<Task, Error> {
        let pass = self.gate.enter()?;
        buffers.check(keys.len(), op == Op::Get)?;
        let bytes = (0..keys.len()).map(|index| buffers.bytes(index)).sum();
        let journal = Journal::dispatched(op.name(), keys.len(), bytes);
        let task = Task::new(keys.len(), journal);
        match self.dial.link() {
            Some(link) => {
                if options.staged {
                    link.mover.copier.make_slab()?;
                }
                let call = Call::new((op, options), id, keys, buffers, task.clone(), pass);
                link.start(call);
            }
            None if op == Op::Put => {
                self.stores.drop_put();
                task.abandon(Outcome::Dropped);
            }
            None => task.abandon(Outcome::Miss),
        }
        Ok(task)
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

    fn describe(&self, id: NamespaceId, description: &str) -> Result<(), Error> {
        self.tell_all(&Told::Description(id, description.to_owned()))
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
        let asked = self.ask(empty, Out::new(Verb::Stats, 0), |body, _| body.json());
        asked.unwrap_or_else(|_| empty())
    }

    fn namespaces(&self) -> Result<Vec<NamespaceUsage>, Error> {
        let mut all: Vec<NamespaceUsage> = Vec::new();
        loop {
            let last = all.last().map(|one| one.id);
            let page = self.namespaces_after(last)?;
            if page.is_empty() {
                return Ok(all);
            }
            all.extend(page);
        }
    }

    fn gone(&self, limit: usize) -> Result<Gone, Error> {
        Client::gone(self, limit)
    }

    /// False also where there is no owner, and once after puts were dropped with one.
    fn drain(&self, timeout: Duration) -> bool {
        let deadline = clock::now().checked_add(timeout);
        loop {
            let left = deadline.map_or(DRAIN_SLICE, |deadline| {
                deadline.saturating_duration_since(clock::now())
            });
            let mut out = Out::new(Verb::Drain, 0);
            out.long(left.min(DRAIN_SLICE).as_millis() as u64);
            match self.ask(|| None, out, |body, _| body.flag().map(Some)) {
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
            tracing::warn!("the owner did not end this process's tasks: they are given up");
        }
        link.iter().for_each(|link| link.mover.close());
        self.dial.take_leave(link);
        // What was given up ends when the lanes have stopped.
        self.gate.wait_empty(Duration::MAX);
    }

    fn devices(&self) -> Result<Vec<DeviceStats>, Error> {
        Client::devices(self)
    }

    fn add_device(&self, path: &Path, capacity: Option<u64>) -> Result<Opening, Error> {
        Client::add_device(self, path, capacity)
    }

    fn drain_device(&self, path: &Path, to: DrainTo, patience: Duration) -> Result<Drained, Error> {
        Client::drain_device(self, path, to, patience)
    }

    fn remove_device(&self, path: &Path, force: bool, patience: Duration) -> Result<(), Error> {
        Client::remove_device(self, path, force, patience)
    }

    fn grow_device(&self, path: &Path, capacity: u64) -> Result<(), Error> {
        Client::grow_device(self, path, capacity)
    }

    fn contains(&self, id: NamespaceId, keys: &[Key]) -> Result<Vec<bool>, Error> {
        let mut out = of_namespace(Verb::Contains, 0, id);
        out.keys(keys);
        self.ask(
            || vec![false; keys.len()],
            out,
            |body, _| (0..keys.len()).map(|_| body.flag()).collect(),
        )
    }

    fn prefix(&self, id: NamespaceId, keys: &[Key]) -> Result<usize, Error> {
        let mut out = of_namespace(Verb::Prefix, 0, id);
        out.keys(keys);
        self.ask(|| 0, out, |body, _| Ok(body.long()? as usize))
    }

    fn nearest(&self, id: NamespaceId, keys: &[Key]) -> Result<Vec<Option<usize>>, Error> {
        let mut out = of_namespace(Verb::Nearest, 0, id);
        out.keys(keys);
        self.ask(
            || vec![None; keys.len()],
            out,
            |body, _| {
                (0..keys.len())
                    .map(|_| Ok(usize::from(body.byte()?).checked_sub(1)))
                    .collect()
            },
        )
    }

    fn put(&self, id: NamespaceId, keys: Vec<Key>, buffers: BlockBuffers) -> Result<Task, Error> {
        self.start(Op::Put, id, keys, buffers, GetOptions::default())
    }

    fn get(
        &self,
        id: NamespaceId,
        keys: Vec<Key>,
        buffers: BlockBuffers,
        options: GetOptions,
    ) -> Result<Task, Error> {
        self.start(Op::Get, id, keys, buffers, options)
    }

    fn prefetch(&self, id: NamespaceId, keys: &[Key]) -> Result<Task, Error> {
        let pass = self.gate.enter()?;
        let task = Task::new(keys.len(), Journal::dispatched("prefetch", keys.len(), 0));
        task.release(keys.len());
        match self.dial.link() {
            Some(link) => link.prefetch(id, keys, &task, pass),
            None => task.abandon(Outcome::Miss),
        }
        Ok(task)
    }

    fn remove(&self, id: NamespaceId, keys: &[Key]) -> Result<usize, Error> {
        let mut out = of_namespace(Verb::Remove, 0, id);
        out.keys(keys);
        self.change(out, |body| Ok(body.long()? as usize))
    }

    fn clear(&self, id: NamespaceId) -> Result<usize, Error> {
        let out = of_namespace(Verb::Clear, 0, id);
        self.change(out, |body| Ok(body.long()? as usize))
    }

    fn block_page(
        &self,
        id: NamespaceId,
        from: Option<Cursor>,
        limit: usize,
    ) -> Result<BlockPage, Error> {
        let mut out = of_namespace(Verb::Blocks, 0, id);
        out.flag(from.is_some());
        from.iter().for_each(|from| out.cursor(*from));
        out.long(limit as u64);
        self.ask(BlockPage::default, out, |body, _| {
            let more = body.flag()?;
            let next = Some(body.cursor()?).filter(|_| more);
            let block = |body: &mut In<'_>| Ok((body.key()?, body.long()?));
            let blocks = (0..body.count(40)?).map(|_| block(body));
            let blocks = blocks.collect::<Result<Vec<_>, Error>>()?;
            Ok(BlockPage { blocks, next })
        })
    }

    fn keep_contiguous(&self, id: NamespaceId) -> Result<(), Error> {
        self.tell_all(&Told::Contiguous(id))
    }

    fn reserve(
        &self,
        id: NamespaceId,
        blocks: &[(Key, Vec<u64>)],
        no_room: NoRoom,
    ) -> Result<Vec<Option<Reservation>>, Error> {
        let mut out = of_namespace(Verb::Reserve, 0, id);
        out.byte(no_room as u8);
        let keys: Vec<Key> = blocks.iter().map(|(key, _)| *key).collect();
        out.keys(&keys);
        for (_, lens) in blocks {
            parts::check(lens)?;
            out.word(lens.len() as u32);
            lens.iter().for_each(|len| out.long(*len));
        }
        let read = |body: &mut In<'_>, link: &Link| {
            let mut reserved = Vec::with_capacity(blocks.len());
            // With `Stop` it may end early.
            let count = body.count(1)?.min(blocks.len());
            for (key, lens) in &blocks[..count] {
                let Some(tier) = usize::from(body.byte()?).checked_sub(1) else {
                    reserved.push(None);
                    continue;
                };
                let identity = Identity {
                    namespace: id,
                    key: *key,
                };
                let place = body.place(identity)?;
                reserved.push(Some(Reservation::elsewhere(
                    link.mover.holder,
                    tier,
                    place,
                    lens,
                )));
            }
            Ok(reserved)
        };
        self.ask(|| vec![None; blocks.len()], out, read)
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
        let mut out = Out::new(Verb::Commit, 0);
        out.word(mine.len() as u32);
        for at in &mine {
            put_name(&mut out, reservations[*at].tier, &reservations[*at].place);
        }
        for at in &mine {
            out.word(checksums[*at].len() as u32);
            checksums[*at].iter().for_each(|sum| out.bytes(&sum.0));
        }
        let committed = link.call(out, |body| {
            let flags = (0..mine.len()).map(|_| body.flag());
            flags.collect::<Result<Vec<bool>, Error>>()
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
        let ended = reservations
            .iter()
            .map(|one| (one.holder, (one.tier, one.place)));
        self.tell_ends(ended.collect(), || Out::new(Verb::Abort, 0));
    }

    fn pin(&self, id: NamespaceId, keys: &[Key], prefix: bool) -> Result<Vec<Option<Pin>>, Error> {
        let mut out = of_namespace(Verb::Pin, 0, id);
        out.flag(prefix);
        out.keys(keys);
        let read = |body: &mut In<'_>, link: &Link| {
            let mut pins = Vec::with_capacity(keys.len());
            let mut unread = Vec::new();
            for key in keys {
                let Some(tier) = usize::from(body.byte()?).checked_sub(1) else {
                    pins.push(None);
                    continue;
                };
                let place = body.place(Identity {
                    namespace: id,
                    key: *key,
                })?;
                // The owner has looked at the table; a medium that this process cannot read is a
                // miss.
                let parts = parts::single(&place).or_else(|| {
                    let mapping = link.mover.medium(&place)?;
                    let (extents, sum) = (&place.extents, place.checksum);
                    let (len, parts) = (place.len, place.parts);
                    let found = parts::read(&mapping, &place.identity, extents, len, parts, sum);
                    found.map(Parts::from)
                });
                if parts.is_none() {
                    unread.push((tier, place));
                }
                let name = self.about.tiers.get(tier).map_or("", String::as_str);
                let tier = (tier, frame::tier_name(name));
                pins.push(parts.map(|parts| Pin::new(link.mover.holder, tier, place, parts)));
            }
            if !unread.is_empty() {
                self.dial.tell(link.mover.holder, give_back_pins(&unread));
            }
            Ok(pins)
        };
        self.ask(|| vec![None; keys.len()], out, read)
    }

    fn unpin(&self, pins: &[Pin], served: bool) {
        if self.gate.forked() {
            return;
        }
        let ended = pins.iter().map(|pin| (pin.holder, (pin.tier, pin.place)));
        self.tell_ends(ended.collect(), || unpin(served));
    }

    fn discard(&self, pins: &[Pin]) -> usize {
        let Ok(_pass) = self.gate.enter() else {
            return 0;
        };
        let Some((link, mine)) = self.current(pins, |pin| pin.holder) else {
            return 0;
        };
        let mut out = Out::new(Verb::Discard, 0);
        out.word(mine.len() as u32);
        mine.iter()
            .for_each(|at| put_name(&mut out, pins[*at].tier, &pins[*at].place));
        let count = link.call(out, |body| Ok(body.long()? as usize));
        count.unwrap_or(0)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.close();
    }
}
