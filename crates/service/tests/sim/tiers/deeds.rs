//! The doors: each step as calls of the depot, and what they have to answer.

use std::time::Duration;

use kvdepot_store::{BlockBuffers, Buffer, Error, GetOptions, Task};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::sim::twin::Id;

use super::steps::{KEYS, Step};
use super::world::{Asked, Block, Expect, Flying, World};
use crate::world::{Law, key, law, number, spec};

impl World {
    /// Lets one thing happen.
    pub fn perform(&self, step: &Step) -> Law {
        crate::log::step(step, self.nested.get() > 0);
        self.tick();
        let owner = self.owner();
        match step {
            Step::Put { ns, keys } => self.put(*ns, keys),
            Step::Get { ns, keys, prefix } => self.get(*ns, keys, *prefix),
            Step::Lookup { ns, keys } => self.lookup(*ns, keys),
            Step::Contains { ns, keys } => self.contains(*ns, keys),
            Step::Prefix { ns, keys } => self.prefix(*ns, keys),
            Step::Nearest { ns, keys } => self.nearest(*ns, keys),
            Step::Prefetch { ns, keys } => self.prefetch(*ns, keys),
            Step::Remove { ns, keys } => self.remove(*ns, keys),
            Step::Clear { ns } => self.clear(*ns),
            Step::List { ns } => self.list(*ns),
            Step::Reserve { ns, keys } => self.reserve(*ns, keys),
            Step::Commit { held, count } => self.commit(*held, *count),
            Step::Abort { held, count } => self.abort(*held, *count),
            Step::Pin { ns, keys, prefix } => self.pin(*ns, keys, *prefix),
            Step::Load { pin } => self.load(*pin),
            Step::Unpin { pin, count, served } => self.unpin(*pin, *count, *served),
            Step::Gone => self.gone(),
            Step::Drain => {
                self.door("drain");
                // What lanes copy to the first tier does not wait yet.
                let _drained = owner.drain(Duration::ZERO);
                Ok(())
            }
            Step::Jobs { count } => {
                (0..*count).for_each(|_| {
                    self.schedule.step();
                });
                Ok(())
            }
            Step::Background { count } => {
                (0..*count).for_each(|_| {
                    let _did = owner.step_evictor() || owner.step_background();
                });
                Ok(())
            }
            Step::Ring => {
                self.pass(None);
                Ok(())
            }
            Step::Pass { ms, jobs } => {
                let span = Duration::from_millis((*ms).into());
                self.pass(Some(span));
                for _ in 0..*jobs {
                    self.schedule.step();
                    self.pass(Some(span));
                }
                Ok(())
            }
            Step::Settle => self.rest(),
            Step::Fail { count } => {
                self.fail(*count);
                Ok(())
            }
            Step::Mood { tier, mood } => {
                self.storm();
                self.fault("mood");
                self.shelves[usize::from(*tier) % self.shelves.len()].set_mood(*mood);
                Ok(())
            }
            Step::Rot { tier, ns, key, at } => {
                self.rot(*tier, (*ns, *key), (*at).into());
                Ok(())
            }
            Step::Calm => self.calm_down(),
            Step::Reopen => self.reopen(),
            Step::Share { deed } => self.share(deed),
        }
    }

    /// Time passes. Where all tiers answer, not before they have.
    fn pass(&self, span: Option<Duration>) {
        if self.calm.get() && self.schedule.waiting() > 0 {
            return;
        }
        self.fault("time-out");
        let waits = !self.flying.borrow().is_empty() || !self.held.borrow().is_empty();
        let waits = waits || self.owner().stats().write_back_bytes > 0;
        match span {
            Some(span) => self.schedule.pass(span),
            None => {
                self.schedule.ring();
            }
        }
        if waits {
            self.offers.borrow_mut().are_late();
        }
    }

    fn fail(&self, count: u8) {
        self.storm();
        self.fault("lane");
        let fail = &self.turns.fail;
        fail.store(count.into(), std::sync::atomic::Ordering::Relaxed);
    }

    /// Of this block or the next one that is there.
    fn rot(&self, tier: u8, (ns, first): Id, at: u64) {
        let shelf = &self.shelves[usize::from(tier) % self.shelves.len()];
        let mut all = (0..KEYS).map(|next| (ns, ((u64::from(first) + next) % KEYS) as u16));
        if let Some(id) = all.find(|id| shelf.rot(&World::identity(*id), at)) {
            self.fault("rot");
            self.freed.set(true);
            self.rotted.borrow_mut().insert(id);
            let now = self.now.get();
            self.change(id, |block| (block.lasting, block.disturbed) = (false, now));
        }
    }

    pub fn reopen(&self) -> Law {
        if self.nested.get() > 0 {
            return Ok(());
        }
        let was_calm = self.calm.get();
        self.storm();
        self.close()?;
        self.open()?;
        match was_calm {
            true => self.calm_down(),
            false => Ok(()),
        }
    }

    fn ids(ns: u8, keys: &[u16]) -> Vec<Id> {
        keys.iter().map(|key| (ns, *key)).collect()
    }

    /// Asks what need not ask tiers apart where all is near; whether it did not.
    fn ask_near<T>(&self, ns: u8, keys: &[u16], ask: impl FnOnce() -> Law<T>) -> Law<(T, bool)> {
        let near = self.are_near(ns, keys)?;
        let (asked, inner) = (self.asked(), self.inner.get());
        let answer = ask()?;
        let is_near = near.iter().all(|near| *near);
        let apart = self.asked() - asked;
        law!(
            // What has stayed in such a tier is sent on from there, and nobody waits for that.
            apart == 0 || !is_near || self.inner.get() > inner || !self.shape.second.is_empty(),
            "all of {keys:?} are near, and tiers apart were asked {apart} times"
        );
        Ok((answer, is_near))
    }

    pub fn fly(&self, task: Task, asked: Asked, ids: Vec<Id>) -> Flying {
        Flying {
            expect: vec![Expect::Any; ids.len()],
            safe: Vec::new(),
            task,
            asked,
            ids,
            buffers: Vec::new(),
            since: self.now.get(),
            storms: self.storms.get(),
            calm: self.calm.get(),
            is_near: false,
            foreign: false,
            idle: false,
            inner: self.inner.get(),
        }
    }

    fn put(&self, ns: u8, keys: &[u16]) -> Law {
        let mut keys = keys.to_vec();
        keys.retain(|key| self.parts((ns, *key)).len() == 1);
        if keys.is_empty() {
            return Ok(());
        }
        self.door("put");
        let (namespace, ids, now) = (self.namespace(ns)?, World::ids(ns, &keys), self.now.get());
        let mut buffers = BlockBuffers::default();
        for id in &ids {
            let bytes = content(self.block(*id).content, self.len(*id));
            buffers.push(vec![Buffer::from_vec(bytes)]);
            self.change(*id, |block| block.begun = Some(now));
            self.offers(self.payload(*id));
        }
        let safe = ids.iter().map(|id| self.is_safe(*id)).collect();
        let (asked, inner) = (self.asked(), self.inner.get());
        let bytes: usize = ids.iter().map(|id| self.len(*id)).sum();
        let idle = self.is_idle(bytes as u64);
        let put = namespace.put(keys.iter().map(|number| key(*number)).collect(), buffers);
        let task = put.map_err(|error| format!("put: {error}"))?;
        let mut counts = self.counts.get();
        counts.put_blocks += ids.len() as u64;
        self.counts.set(counts);
        let first_lasts = self.shape.pipeline.starts_with("Dax");
        let is_near = first_lasts && idle && self.asked() == asked;
        let flying = Flying {
            is_near,
            idle,
            inner,
            safe,
            ..self.fly(task, Asked::Put, ids)
        };
        self.flying.borrow_mut().push(flying);
        Ok(())
    }

    fn get(&self, ns: u8, keys: &[u16], prefix: bool) -> Law {
        self.door("get");
        let (namespace, ids) = (self.namespace(ns)?, World::ids(ns, keys));
        let mut expect = ids
            .iter()
            .map(|id| self.expect(*id))
            .collect::<Law<Vec<_>>>()?;
        if prefix {
            // What is behind a gap is a miss.
            let gap = expect.iter().position(|one| *one != Expect::There);
            let gap = gap.unwrap_or(ids.len());
            let behind = expect.get(gap).copied().unwrap_or(Expect::Any);
            expect[gap..].fill(behind);
        }
        let each = ids.iter().map(|id| vec![0xEE; self.len(*id)]);
        let buffers: Vec<Buffer> = each.map(Buffer::from_vec).collect();
        let names = keys.iter().map(|number| key(*number)).collect();
        let mut options = GetOptions::default();
        options.prefix = prefix;
        let joined = || self.owner().stats().coalesced_blocks;
        let before = joined();
        let (task, is_near) = self.ask_near(ns, keys, || {
            let got = namespace.get_with(names, BlockBuffers::whole(buffers.clone()), options);
            got.map_err(|error| format!("get: {error}"))
        })?;
        let mut counts = self.counts.get();
        counts.get_blocks += ids.len() as u64;
        self.counts.set(counts);
        let flying = Flying {
            buffers,
            expect,
            // Who joins another's load waits for that.
            is_near: is_near && joined() == before,
            ..self.fly(task, Asked::Get, ids)
        };
        self.flying.borrow_mut().push(flying);
        Ok(())
    }

    fn lookup(&self, ns: u8, keys: &[u16]) -> Law {
        self.door("lookup");
        let (namespace, ids) = (self.namespace(ns)?, World::ids(ns, keys));
        let expect = ids
            .iter()
            .map(|id| self.expect(*id))
            .collect::<Law<Vec<_>>>()?;
        let (task, is_near) = self.ask_near(ns, keys, || {
            let names: Vec<_> = keys.iter().map(|number| key(*number)).collect();
            let task = namespace.lookup(&names);
            task.map_err(|error| format!("lookup: {error}"))
        })?;
        let flying = Flying {
            expect,
            is_near,
            ..self.fly(task, Asked::Lookup, ids)
        };
        self.flying.borrow_mut().push(flying);
        Ok(())
    }

    fn prefetch(&self, ns: u8, keys: &[u16]) -> Law {
        self.door("prefetch");
        let (namespace, ids) = (self.namespace(ns)?, World::ids(ns, keys));
        let names: Vec<_> = keys.iter().map(|number| key(*number)).collect();
        let task = namespace.prefetch(&names);
        let task = task.map_err(|error| format!("prefetch: {error}"))?;
        let flying = self.fly(task, Asked::Prefetch, ids);
        self.flying.borrow_mut().push(flying);
        Ok(())
    }

    /// Asks which of these are there, and compares.
    fn compare(
        &self,
        ns: u8,
        keys: &[u16],
        ask: impl FnOnce() -> Result<Vec<Option<bool>>, Error>,
    ) -> Law {
        let ids = World::ids(ns, keys);
        let since = self.now.get();
        let before = ids
            .iter()
            .map(|id| self.expect(*id))
            .collect::<Law<Vec<_>>>()?;
        let inner = self.inner.get();
        let found = ask().map_err(|error| format!("a lookup: {error}"))?;
        let alone = inner == self.inner.get();
        for ((id, expect), found) in ids.iter().zip(before).zip(found) {
            let Some(found) = found else {
                continue;
            };
            let expect = if alone { expect } else { Expect::Any };
            self.found(*id, found, expect, since)?;
        }
        Ok(())
    }

    /// A question since `since` was answered so.
    pub fn found(&self, id: Id, found: bool, expect: Expect, since: u64) -> Law {
        let block = self.block(id);
        let may_be = block.begun.is_some() || block.past.iter().any(|(_, until)| *until >= since);
        let is_foreign = self.was_foreign(id, since);
        law!(
            may_be || !found || is_foreign,
            "{id:?} is found, which nobody has put"
        );
        let expect = if block.disturbed >= since || is_foreign {
            Expect::Any
        } else {
            expect
        };
        let fits = match expect {
            Expect::There => found,
            // It may have been put since.
            Expect::Absent => !found || block.begun.is_some_and(|begun| begun >= since),
            Expect::Any => true,
        };
        law!(fits, "{id:?} is found: {found}, not {expect:?}");
        Ok(())
    }

    fn contains(&self, ns: u8, keys: &[u16]) -> Law {
        self.door("contains");
        let namespace = self.namespace(ns)?;
        let names: Vec<_> = keys.iter().map(|number| key(*number)).collect();
        let ask = || Ok(namespace.contains(&names)?.into_iter().map(Some).collect());
        self.compare(ns, keys, || {
            let asked = self.ask_near(ns, keys, || Ok(ask()));
            match asked {
                Ok((found, _)) => found,
                Err(broken) => {
                    self.broken.borrow_mut().get_or_insert(broken);
                    Ok(Vec::new())
                }
            }
        })
    }

    fn prefix(&self, ns: u8, keys: &[u16]) -> Law {
        self.door("prefix");
        let namespace = self.namespace(ns)?;
        let names: Vec<_> = keys.iter().map(|number| key(*number)).collect();
        self.compare(ns, keys, || {
            let count = namespace.prefix(&names)?;
            let of = |at: usize| (at <= count).then_some(at < count);
            Ok((0..names.len()).map(of).collect())
        })
    }

    fn nearest(&self, ns: u8, keys: &[u16]) -> Law {
        self.door("nearest");
        let namespace = self.namespace(ns)?;
        let names: Vec<_> = keys.iter().map(|number| key(*number)).collect();
        self.compare(ns, keys, || {
            let nearest = namespace.nearest(&names)?;
            let found = nearest.into_iter().map(|tier| Some(tier.is_some()));
            Ok(found.collect())
        })
    }

    fn remove(&self, ns: u8, keys: &[u16]) -> Law {
        self.door("remove");
        let ids = World::ids(ns, keys);
        let names: Vec<_> = keys.iter().map(|number| key(*number)).collect();
        let namespace = self.namespace(ns)?;
        self.removed(&ids, || namespace.remove(&names))
    }

    fn clear(&self, ns: u8) -> Law {
        self.door("clear");
        let all: Vec<u16> = (0..KEYS as u16).collect();
        let namespace = self.namespace(ns)?;
        self.removed(&World::ids(ns, &all), || namespace.clear())
    }

    /// What was removed, and is met by no put, does not come back.
    fn removed(&self, ids: &[Id], remove: impl FnOnce() -> Result<usize, Error>) -> Law {
        let since = self.now.get();
        self.freed.set(true);
        let undisturbed: Vec<bool> = ids.iter().map(|id| !self.is_written(*id)).collect();
        for id in ids {
            self.change(*id, |block| {
                (block.lasting, block.disturbed) = (false, since);
                block.removing += 1;
            });
        }
        let names = ids.iter().map(|id| World::identity(*id));
        let names: Vec<_> = names.map(|one| (one.namespace, one.key)).collect();
        for shelf in &self.shelves {
            shelf.may_remove(names.iter().copied());
        }
        let removed = remove();
        let now = self.tick();
        law!(
            removed.is_ok() || !self.calm.get(),
            "a removal of {ids:?}: {removed:?}"
        );
        for (id, undisturbed) in ids.iter().zip(undisturbed) {
            let content = self.number();
            let is_met = self.block(*id).begun.is_some_and(|begun| begun >= since);
            self.change(*id, |block| {
                (block.lasting, block.disturbed) = (false, now);
                block.removing -= 1;
                if removed.is_ok() && undisturbed && !is_met {
                    let before = std::mem::replace(&mut block.content, content);
                    let past = block.begun.take().map(|_| (before, now));
                    block.past.extend(past);
                }
            });
        }
        Ok(())
    }

    fn list(&self, ns: u8) -> Law {
        self.door("list");
        let (namespace, since) = (self.namespace(ns)?, self.now.get());
        let ids = (0..KEYS as u16).map(|key| (ns, key));
        let before = ids.map(|id| Ok((id, self.expect(id)?)));
        let before = before.collect::<Law<Vec<_>>>()?;
        let inner = self.inner.get();
        let listed = namespace.blocks();
        law!(
            listed.is_ok() || !self.calm.get(),
            "a listing: {:?}",
            listed.err()
        );
        let Ok(listed) = listed else {
            return Ok(());
        };
        let alone = inner == self.inner.get();
        for (id, expect) in before {
            let found = listed.iter().find(|(key, _)| number(key) == id.1);
            let len = self.payload(id);
            law!(
                found.is_none_or(|(_, listed)| *listed == len),
                "{id:?} has {len} bytes, and is listed as {found:?}"
            );
            let expect = if alone { expect } else { Expect::Any };
            self.found(id, found.is_some(), expect, since)?;
        }
        Ok(())
    }

    fn gone(&self) -> Law {
        self.door("gone");
        let inner = self.inner.get();
        let gone = self.owner().gone(1000);
        let gone = gone.map_err(|error| format!("gone: {error}"))?;
        if inner < self.inner.get() {
            return Ok(());
        }
        for (identity, _) in gone.blocks {
            let ns = u8::from(spec(0).id().unwrap() != identity.namespace);
            let id = (ns, number(&identity.key));
            law!(
                self.expect(id)? != Expect::There,
                "{id:?} is said to be gone, and is there"
            );
        }
        Ok(())
    }

    /// All is done that can be, and then nothing is left.
    pub fn rest(&self) -> Law {
        if self.nested.get() > 0 {
            return Ok(());
        }
        self.let_go()?;
        self.settle()?;
        // What others have taken meanwhile.
        self.alone(|| self.let_go().and_then(|()| self.settle()))?;
        self.collect()?;
        self.at_rest()
    }

    /// What a reader may get that has asked since `since`.
    pub fn readable(block: &Block, since: u64) -> Vec<u64> {
        let past = block.past.iter().filter(|(_, until)| *until >= since);
        let now = block.begun.map(|_| block.content);
        past.map(|(content, _)| *content).chain(now).collect()
    }

    /// Nothing is under way that a put of so many bytes would wait for.
    fn is_idle(&self, bytes: u64) -> bool {
        let stats = self.owner().stats();
        let writes = stats.tiers.iter().any(|tier| tier.reserved_blocks > 0);
        let depth = match self.shape.write_back {
            0 => stats.tiers[0].capacity_bytes / 2,
            kib => kib << 10,
        };
        !writes && stats.write_back_bytes == 0 && bytes <= depth
    }
}
