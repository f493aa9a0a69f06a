//! A second depot over the directory of `Posix` in the same history: it puts, gets and removes what
//! the first one does, collects with it, ends, and dies.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvdepot_store::{BlockBuffers, Buffer, Config, Depot};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::sim::twin::Id;
use serde_json::json;

use super::memory::Bytes;
use super::shelf::Shelf;
use super::steps::KEYS;
use super::world::{Asked, Expect, Flying, World};
use crate::world::{Law, key, law};

/// Most that die: nobody sweeps in a history without threads, and what they were granted stays in
/// the count.
const DEATHS: u32 = 3;

/// How long one depot may not know what the other has done: it remembers what it has found and
/// missed.
const UNKNOWN: Duration = Duration::from_secs(10);

/// What the second one does.
#[derive(Clone, Debug)]
pub enum Deed {
    Put {
        ns: u8,
        keys: Vec<u16>,
    },
    Get {
        ns: u8,
        keys: Vec<u16>,
    },
    /// The first one is done with all it does before, if it is `quiet`.
    Remove {
        ns: u8,
        keys: Vec<u16>,
        quiet: bool,
    },
    /// It is closed, or it dies, and another one comes.
    End {
        dies: bool,
    },
}

impl World {
    pub fn shares(&self) -> bool {
        self.shape.shared && self.shape.bytes == Bytes::Posix
    }

    pub fn open_sharer(&self) -> Law {
        if !self.shares() || self.sharer.borrow().is_some() {
            return Ok(());
        }
        self.door("open sharer");
        self.forget_seen();
        let mut settings = json!({
            "socket": "off",
            "lanes": 2,
            "close_timeout": "0s",
            "posix": self.posix_section(),
        });
        if self.shape.keyed {
            settings["mac_key_file"] = json!(self.keys());
        }
        let config = Config::new("Posix", &settings).unwrap();
        let depot = Depot::open(&config).map_err(|error| format!("a sharer: {error}"))?;
        *self.sharer.borrow_mut() = Some(depot);
        Ok(())
    }

    pub fn share(&self, deed: &Deed) -> Law {
        let Some(depot) = self.sharer.borrow().clone() else {
            return Ok(());
        };
        match deed {
            Deed::Put { ns, keys } => self.sharer_puts(&depot, *ns, keys),
            Deed::Get { ns, keys } => self.sharer_gets(&depot, *ns, keys),
            Deed::Remove { ns, keys, quiet } => self.sharer_removes(&depot, *ns, keys, *quiet),
            Deed::End { .. } if self.nested.get() > 0 => Ok(()),
            Deed::End { dies } => {
                drop(depot);
                self.end_sharer(*dies)?;
                self.open_sharer()
            }
        }
    }

    fn sharer_puts(&self, depot: &Depot, ns: u8, keys: &[u16]) -> Law {
        let keys = keys.iter().copied();
        let keys: Vec<u16> = keys
            .filter(|key| self.parts((ns, *key)).len() == 1)
            .collect();
        if keys.is_empty() {
            return Ok(());
        }
        self.door("sharer's put");
        let ids: Vec<Id> = keys.iter().map(|key| (ns, *key)).collect();
        let safe = ids.iter().map(|id| self.is_safe(*id)).collect();
        let mut buffers = BlockBuffers::default();
        for id in &ids {
            let bytes = content(self.block(*id).content, self.len(*id));
            buffers.push(vec![Buffer::from_vec(bytes)]);
            self.change(*id, |block| block.begun = Some(self.now.get()));
            self.is_foreign(*id);
        }
        let namespace = depot.namespace(&crate::world::spec(ns));
        let namespace = namespace.map_err(|error| format!("a sharer's namespace: {error}"))?;
        let task = namespace.put(keys.into_iter().map(key).collect(), buffers);
        let task = task.map_err(|error| format!("a sharer's put: {error}"))?;
        let flying = Flying {
            safe,
            foreign: true,
            ..self.fly(task, Asked::Put, ids)
        };
        self.flying.borrow_mut().push(flying);
        Ok(())
    }

    fn sharer_gets(&self, depot: &Depot, ns: u8, keys: &[u16]) -> Law {
        self.door("sharer's get");
        let ids: Vec<Id> = keys.iter().map(|key| (ns, *key)).collect();
        let expect = ids.iter().map(|id| {
            let shelf = self.shelves.last();
            let there = shelf.is_some_and(|shelf| shelf.has(&World::identity(*id)));
            let stays = there && self.block(*id).lasting;
            Ok(match self.expect(*id)? {
                Expect::There if stays => Expect::There,
                _ => Expect::Any,
            })
        });
        let expect = expect.collect::<Law<Vec<_>>>()?;
        let each = ids.iter().map(|id| vec![0xEE; self.len(*id)]);
        let buffers: Vec<Buffer> = each.map(Buffer::from_vec).collect();
        let namespace = depot.namespace(&crate::world::spec(ns));
        let namespace = namespace.map_err(|error| format!("a sharer's namespace: {error}"))?;
        let names = keys.iter().map(|number| key(*number)).collect();
        let task = namespace.get(names, BlockBuffers::whole(buffers.clone()));
        let task = task.map_err(|error| format!("a sharer's get: {error}"))?;
        let flying = Flying {
            buffers,
            expect,
            foreign: true,
            ..self.fly(task, Asked::Get, ids)
        };
        self.flying.borrow_mut().push(flying);
        Ok(())
    }

    /// What it removes the first one may still have near, or be about to store. Only where that
    /// has nothing of it does the next put have other bytes.
    fn sharer_removes(&self, depot: &Depot, ns: u8, keys: &[u16], quiet: bool) -> Law {
        self.door("sharer's removal");
        self.freed.set(true);
        if quiet && self.nested.get() == 0 {
            self.let_go()?;
            self.settle()?;
            self.collect()?;
        }
        let since = self.now.get();
        let ids: Vec<Id> = keys.iter().map(|key| (ns, *key)).collect();
        let idle = self.is_quiet();
        let near = self.are_near(ns, keys)?;
        let nearer = &self.shelves[..self.shelves.len() - 1];
        let clean = ids.iter().zip(near).map(|(id, near)| {
            let identity = World::identity(*id);
            let there = |shelf: &Arc<Shelf>| shelf.knows(identity.namespace, identity.key);
            idle && !near && !nearer.iter().any(there)
        });
        let clean: Vec<bool> = clean.collect();
        for id in &ids {
            self.change(*id, |block| {
                (block.lasting, block.disturbed) = (false, since);
                block.removing += 1;
            });
        }
        let names: Vec<_> = keys.iter().map(|number| key(*number)).collect();
        let namespace = depot.namespace(&crate::world::spec(ns));
        let namespace = namespace.map_err(|error| format!("a sharer's namespace: {error}"))?;
        let inner = self.inner.get();
        let removed = namespace.remove(&names);
        removed.map_err(|error| format!("a sharer's removal: {error}"))?;
        let (alone, now) = (inner == self.inner.get(), self.tick());
        for (id, clean) in ids.into_iter().zip(clean) {
            let number = self.number();
            self.is_foreign(id);
            self.change(id, |block| {
                (block.lasting, block.disturbed) = (false, now);
                block.removing -= 1;
                if clean && alone {
                    let before = std::mem::replace(&mut block.content, number);
                    let past = block.begun.take().map(|_| (before, now));
                    block.past.extend(past);
                }
            });
        }
        Ok(())
    }

    /// Whether nothing is under way anywhere.
    fn is_quiet(&self) -> bool {
        let stats = self.owner().stats();
        let held = |tier: &kvdepot_store::TierStats| tier.pinned_blocks + tier.reserved_blocks > 0;
        self.nested.get() == 0
            && self.flying.borrow().is_empty()
            && self.held.borrow().is_empty()
            && self.schedule.waiting() == 0
            && stats.write_back_bytes == 0
            && !stats.tiers.iter().any(held)
    }

    /// Something was done to a block that the other depot may not know of.
    pub fn is_foreign(&self, id: Id) {
        if let Some(now) = kvdepot_media::sim::now().filter(|_| self.shares()) {
            self.foreign.borrow_mut().insert(id, now);
        }
    }

    /// Whether that was lately for who has asked at `since`, or later.
    pub fn was_foreign(&self, id: Id, since: u64) -> bool {
        let when = self.foreign.borrow().get(&id).copied();
        let times = self.times.borrow();
        let asked = times.range(..=since).next_back().map(|(_, at)| *at);
        when.zip(asked)
            .is_some_and(|(when, asked)| asked.saturating_duration_since(when) < UNKNOWN)
    }

    /// Closes it. If it `dies`, what lies in the directory then is what a killed process leaves:
    /// what it was writing, its folder without a lock, and what it was granted.
    pub fn end_sharer(&self, dies: bool) -> Law {
        let Some(depot) = self.sharer.borrow_mut().take() else {
            return Ok(());
        };
        self.alone(|| self.settle())?;
        self.collect()?;
        self.forget_seen();
        let dies = dies && self.deaths.get() < DEATHS;
        let path = self.shelves[self.shelves.len() - 1].path().to_owned();
        let mut left = Vec::new();
        let mut count = Vec::new();
        let mut held = None;
        if dies {
            self.fault("sharer killed");
            self.deaths.set(self.deaths.get() + 1);
            let namespace = depot.namespace(&crate::world::spec(0));
            let namespace = namespace.map_err(|error| format!("a sharer's namespace: {error}"))?;
            let begun = [(key(KEYS as u16 + 200), vec![self.shape.largest])];
            let begun = self.alone(|| namespace.reserve(&begun));
            let begun = begun.map_err(|error| format!("a sharer's reservation: {error}"))?;
            left = folders(&path);
            count = fs::read(path.join("usage")).unwrap();
            held = Some((namespace, begun));
        } else {
            self.door("close sharer");
        }
        if let Some((namespace, begun)) = held {
            namespace.abort(&begun.into_iter().flatten().collect::<Vec<_>>());
        }
        self.alone(|| depot.close());
        drop(depot);
        self.collect()?;
        let flying = self.flying.borrow();
        law!(
            !flying.iter().any(|one| one.foreign),
            "a sharer is closed, and has not ended what it was asked"
        );
        if dies {
            let after: BTreeSet<PathBuf> = folders(&path).into_iter().map(|one| one.0).collect();
            for (folder, files) in left.into_iter().filter(|one| !after.contains(&one.0)) {
                fs::create_dir_all(&folder).unwrap();
                for (name, bytes) in files {
                    fs::write(folder.join(name), vec![0; bytes as usize]).unwrap();
                }
            }
            fs::write(path.join("usage"), count).unwrap();
        }
        Ok(())
    }
}

/// A folder with its files, and their bytes.
type Writers = Vec<(PathBuf, Vec<(String, u64)>)>;

/// The folders of those who write to a directory.
fn folders(path: &Path) -> Writers {
    let each = fs::read_dir(path.join("new")).into_iter().flatten();
    let each = each.map(|folder| {
        let folder = folder.unwrap().path();
        let files = fs::read_dir(&folder).into_iter().flatten().map(|file| {
            let file = file.unwrap();
            let name = file.file_name().into_string().unwrap();
            (name, file.metadata().unwrap().len())
        });
        (folder, files.collect())
    });
    each.collect()
}
