//! The depot of a history, what is done to it, and what must hold.

use std::collections::BTreeSet;
use std::time::Duration;

use kvdepot_store::{BlockBuffers, Buffer, Config, Cursor, Depot, Key, Namespace, PAGE_MAX};
use kvdepot_testkit::etcd::free_ports;
use kvdepot_testkit::sim::tally::Tally;
use serde_json::json;

use super::steps::{Deed, LARGE, Shape, USUAL};
use crate::world::{Law, key, law, spec};

/// Payload of a block; a file has a header besides.
const BLOCK: usize = 12 << 10;
const FILE: u64 = 16 << 10;

/// Longer than any call takes, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// Whose a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Prompt {
    Usual(u16),
    Large(u16),
}

pub struct PromptDepot {
    shape: Shape,
    dir: tempfile::TempDir,
    /// Where `Peer` listens.
    port: u16,
    depot: Option<(Depot, Namespace)>,
    /// Blocks that were removed, and that may be missed before others of their prompt.
    removed: BTreeSet<Key>,
    /// Blocks that an earlier owner has stored: nothing says where in their prompt they stand, or
    /// how it has used them.
    earlier: BTreeSet<Key>,
    /// What the last tier had at the last look.
    seen: BTreeSet<Key>,
    pub tally: Tally,
}

impl PromptDepot {
    pub fn new(shape: &Shape) -> PromptDepot {
        let dir = tempfile::Builder::new()
            .prefix("kvsim")
            .tempdir_in(crate::disk::dir())
            .unwrap();
        PromptDepot {
            shape: shape.clone(),
            dir,
            port: free_ports()[0],
            depot: None,
            removed: BTreeSet::new(),
            earlier: BTreeSet::new(),
            seen: BTreeSet::new(),
            tally: Tally::default(),
        }
    }

    pub fn open(&mut self) -> Law {
        self.tally.door("open");
        let (blocks, block) = (self.shape.blocks, BLOCK as u64);
        let arena = json!({
            "path": self.dir.path().join("arena"), "records": blocks,
            "capacity": blocks * block + (1 << 20),
        });
        let near = if self.shape.pipeline == "Cache" {
            blocks
        } else {
            blocks / 3
        };
        let mut settings = json!({
            "socket": "off", "lanes": 1,
            "admission": if self.shape.learned { "learned" } else { "all" },
        });
        for tier in self.shape.pipeline.split('|') {
            match tier {
                "Cache" => settings["cache"] = json!({"capacity": near * block}),
                "Posix" => {
                    // A lookup may take longer than a machine stands still.
                    settings["posix"] = json!({
                        "path": self.dir.path().join("files"), "capacity": blocks * FILE,
                        "fan_out": 1, "lookup_timeout": "20s",
                    });
                }
                // Of one host: what each of several evicts depends on their homes.
                "Peer" => {
                    settings["peer"] = json!({
                        "name": "a", "hosts": format!("a 127.0.0.1:{}", self.port),
                        "capacity": blocks * block,
                    });
                }
                _ => settings[tier.to_lowercase()] = arena.clone(),
            }
        }
        let open = || {
            let depot = kvdepot_service::open(&Config::new(self.shape.pipeline, &settings)?)?;
            let ns = depot.namespace(&spec(0))?;
            Ok::<_, kvdepot_store::Error>((depot, ns))
        };
        self.depot = Some(open().map_err(|error| format!("open: {error}"))?);
        Ok(())
    }

    pub fn close(&mut self) {
        self.tally.door("close");
        if let Some((depot, _)) = self.depot.take() {
            depot.close();
        }
    }

    pub fn perform(&mut self, deed: &Deed) -> Law {
        match deed {
            Deed::Serve { prompt, step } => {
                self.tally.door("serve");
                let prompt = Prompt::Usual(*prompt);
                let there = self.load(prompt)?;
                let all = self.keys(prompt);
                let mut at = there;
                while at < all.len() {
                    at += self.store(&all, at, *step)?;
                }
                Ok(())
            }
            Deed::Use { prompt } => {
                self.tally.door("use");
                self.load(Prompt::Usual(*prompt)).map(drop)
            }
            Deed::Large {
                prompts,
                step,
                used,
            } => self.large(prompts, *step, used),
            Deed::Remove { prompt, at } => {
                self.tally.fault("removal");
                let keys = self.keys(Prompt::Usual(*prompt));
                let key = keys[usize::from(*at) % keys.len()];
                self.drain()?;
                let removed = self.ns().remove(&[key]);
                removed.map_err(|error| format!("remove: {error}"))?;
                self.removed.insert(key);
                self.look()
            }
            Deed::Reopen => {
                self.tally.fault("reopening");
                self.close();
                self.open()?;
                self.earlier = self.listed()?;
                self.look()
            }
        }
    }

    /// Stores large prompts, of which each is offered as an engine does.
    fn large(&mut self, prompts: &[u16], step: u16, used: &[u16]) -> Law {
        self.tally.door("large");
        let mut under_way = Vec::new();
        for prompt in prompts.iter().collect::<BTreeSet<_>>() {
            let prompt = Prompt::Large(*prompt);
            under_way.push((prompt, self.load(prompt)?));
        }
        let mut used = used.iter().map(|prompt| Prompt::Usual(*prompt)).cycle();
        let (all, mut turn) = (under_way.len(), 0);
        // What was used since all of them began, and where it is one alone, that.
        let mut recent: BTreeSet<Prompt> = BTreeSet::new();
        if let [(only, _)] = under_way[..]
            && self.keeps_order()
        {
            recent.insert(only);
        }
        while !under_way.is_empty() {
            if let Some(usual) = used.next() {
                self.load(usual)?;
                if self.is_behind() {
                    // What the last tier had no space for was offered again: others may have been
                    // evicted for it.
                    recent.clear();
                }
                if turn >= all {
                    recent.insert(usual);
                }
            }
            let at = turn % under_way.len();
            let (prompt, stored) = &mut under_way[at];
            let keys = self.keys(*prompt);
            if *stored >= keys.len() {
                under_way.remove(at);
                continue;
            }
            let (before, at) = (self.found(&recent)?, *stored);
            *stored += self.store(&keys, at, step)?;
            let after = self.found(&recent)?;
            for ((whose, before), (_, after)) in before.into_iter().zip(after) {
                // Of its own what it has not come to yet may be of an earlier use.
                let before = if whose == *prompt {
                    before.min(at)
                } else {
                    before
                };
                law!(
                    after + self.may_go() >= before || !self.keeps_uses(),
                    "{whose:?} was found up to {before} before a call of {prompt:?} that stores \
                     from {at} on, and up to {after} since"
                );
            }
            turn += 1;
        }
        Ok(())
    }

    /// A call of a prompt that stores so many blocks from `at` on, and how many these are.
    fn store(&mut self, all: &[Key], at: usize, step: u16) -> Law<usize> {
        let some: Vec<Key> = all[at..].iter().take(step.into()).copied().collect();
        let after = at.checked_sub(1).map(|before| all[before]);
        let count = some.len();
        let each = (0..count).map(|_| Buffer::from_vec(vec![7; BLOCK]));
        let put = self.ns().put_after(after, some, BlockBuffers::whole(each));
        let put = put.and_then(|task| task.wait(Some(PATIENCE)));
        put.map_err(|error| format!("put: {error}"))?;
        self.drain()?;
        self.look()?;
        Ok(count)
    }

    /// Loads a prompt as far as it is there.
    fn load(&self, prompt: Prompt) -> Law<usize> {
        let keys = self.keys(prompt);
        let failed = |error| format!("get: {error}");
        let there = self.ns().prefix(&keys).map_err(failed)?;
        let each = (0..there).map(|_| Buffer::from_vec(vec![0; BLOCK]));
        let buffers: Vec<Buffer> = each.collect();
        let keys = keys[..there].to_vec();
        let get = self.ns().get(keys, BlockBuffers::whole(buffers.clone()));
        let got = get.and_then(|task| task.wait(Some(PATIENCE)));
        let got = got.map_err(failed)?;
        // Eviction ahead of need may take the tail in between.
        let loaded = got.iter().take_while(|got| **got).count();
        let is_prefix = !got[loaded..].contains(&true);
        law!(
            is_prefix || self.is_behind(),
            "{prompt:?} was found up to {there}, and its block {loaded} alone was not loaded"
        );
        for (got, buffer) in got.iter().zip(buffers) {
            let right = !*got || buffer.to_vec() == vec![7; BLOCK];
            law!(right, "WRONG BYTES of {prompt:?}");
        }
        self.drain()?;
        Ok(loaded)
    }

    /// Tails are evicted before heads: no block stays whose prompt has lost the one before it since
    /// the last look.
    fn look(&mut self) -> Law {
        let listed = self.listed()?;
        let before = std::mem::replace(&mut self.seen, listed);
        if !self.keeps_order() {
            return Ok(());
        }
        for prompt in self.all() {
            let mut keys = self.keys(prompt);
            let found = |key: &&Key| before.contains(*key);
            keys.truncate(keys.iter().take_while(found).count());
            for (at, pair) in keys.windows(2).enumerate() {
                let is_gap = !self.seen.contains(&pair[0]) && self.seen.contains(&pair[1]);
                let may = self.removed.contains(&pair[0])
                    || pair.iter().any(|key| self.earlier.contains(key));
                law!(
                    !is_gap || may,
                    "{prompt:?} has its block {}, and has lost the one before it",
                    at + 1
                );
            }
        }
        Ok(())
    }

    /// How far each of these prompts is there, without using it.
    fn found(&self, prompts: &BTreeSet<Prompt>) -> Law<Vec<(Prompt, usize)>> {
        let listed = self.listed()?;
        let far = |prompt| {
            let keys = self.keys(prompt);
            keys.iter().take_while(|key| listed.contains(key)).count()
        };
        Ok(prompts
            .iter()
            .map(|prompt| (*prompt, far(*prompt)))
            .collect())
    }

    /// What the last tier has. It may evict blocks in the midst of a listing, which then has later
    /// blocks of a prompt without earlier ones; of two equal listings the tier had all at once.
    fn listed(&self) -> Law<BTreeSet<Key>> {
        let mut before = self.listing()?;
        loop {
            let now = self.listing()?;
            if now == before {
                return Ok(now);
            }
            before = now;
        }
    }

    fn listing(&self) -> Law<BTreeSet<Key>> {
        let (depot, ns) = self.depot.as_ref().unwrap();
        // A cursor begins with the number of a tier.
        let last = depot.tiers().len() as u32 - 1;
        let mut from = [0; 20];
        from[..4].copy_from_slice(&last.to_le_bytes());
        let mut from = Some(Cursor::from_bytes(&from));
        let mut keys = BTreeSet::new();
        while from.is_some() {
            let page = ns.blocks_page(from, PAGE_MAX);
            let page = page.map_err(|error| format!("a listing: {error}"))?;
            keys.extend(page.blocks.into_iter().map(|(key, _)| key));
            from = page.next;
        }
        Ok(keys)
    }

    fn drain(&self) -> Law {
        let (depot, _) = self.depot.as_ref().unwrap();
        law!(depot.drain(PATIENCE), "a drain has something left");
        Ok(())
    }

    fn is_behind(&self) -> bool {
        self.shape.pipeline.contains('|')
    }

    /// Whether the last tier keeps what was used: hits in `Cache` are no uses at the hosts of
    /// `Peer`.
    fn keeps_uses(&self) -> bool {
        self.shape.pipeline != "Cache|Peer"
    }

    /// Whether it keeps the blocks of a prompt in order. A block that a load offers to an arena
    /// again is older there than what is stored behind it.
    fn keeps_order(&self) -> bool {
        self.keeps_uses() && self.shape.pipeline != "Cache|Dax"
    }

    /// Blocks that may go of a prompt that was used: the file whose eviction had begun.
    fn may_go(&self) -> usize {
        usize::from(self.shape.pipeline.ends_with("Posix"))
    }

    fn ns(&self) -> &Namespace {
        &self.depot.as_ref().unwrap().1
    }

    fn all(&self) -> impl Iterator<Item = Prompt> + use<> {
        let usual = (0..USUAL).map(Prompt::Usual);
        usual.chain((0..LARGE).map(Prompt::Large))
    }

    /// The blocks of a prompt: usual ones have some in common with each third one.
    fn keys(&self, prompt: Prompt) -> Vec<Key> {
        match prompt {
            Prompt::Usual(prompt) => {
                let (shared, all) = self.shape.usual[usize::from(prompt)];
                let of = |at| match at < shared {
                    true => 1000 + prompt % 3 * 16 + at,
                    false => prompt * 64 + at,
                };
                (0..all).map(|at| key(of(at))).collect()
            }
            Prompt::Large(prompt) => {
                let all = self.shape.large[usize::from(prompt)];
                (0..all).map(|at| key(2000 + prompt * 400 + at)).collect()
            }
        }
    }
}
