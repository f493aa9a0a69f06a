//! Which hosts there are, and which of them are asked for a block.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvdepot_arena::Identity;
use kvdepot_host::Condvar;
use parking_lot::Mutex;

use super::desk::Desk;
use super::messages::bytes_of;
use super::target::{Net, Target};
use super::wire::Wire;
use crate::homes::{HomeMap, Point, REPLICAS_MAX, View};
use crate::membership::Membership;

/// Most hosts that a lookup asks for a key.
const ASKED_MAX: usize = 2;

/// How often hosts that are down are looked at.
const LOOK: Duration = Duration::from_millis(100);

/// A host that is asked.
#[derive(Clone)]
pub(super) enum Whom {
    Own,
    Far(Arc<Target>),
}

impl Whom {
    /// The same for the same host.
    pub(super) fn number(&self) -> usize {
        match self {
            Whom::Own => 0,
            Whom::Far(target) => Arc::as_ptr(target).addr(),
        }
    }
}

/// Where a block is to be.
pub(super) struct Homes {
    /// This host is one of its homes.
    pub(super) is_own: bool,
    /// It is not, and all of them can be reached as they are named.
    pub(super) is_stray: bool,
    pub(super) far: Vec<Arc<Target>>,
}

/// The homes as of a view.
struct Maps {
    now: HomeMap,
    /// Under the view before, where there was one.
    before: Option<Arc<Maps>>,
    /// In the order of the view; none of a host that cannot be reached as it is named.
    hosts: Vec<Option<Whom>>,
}

/// The hosts.
pub(super) struct Hosts {
    own: String,
    membership: Membership,
    replicas: usize,
    net: Arc<Net>,
    timeout: Duration,
    finisher: Arc<Desk>,
    maps: Mutex<Option<Arc<Maps>>>,
    targets: Mutex<HashMap<(String, SocketAddr), Arc<Target>>>,
    closing: Mutex<bool>,
    closed: Condvar,
}

impl Hosts {
    pub(super) fn new(
        own: &str,
        membership: Membership,
        replicas: usize,
        net: Arc<Net>,
        timeout: Duration,
    ) -> Hosts {
        Hosts {
            own: own.to_owned(),
            membership,
            replicas,
            net,
            timeout,
            finisher: Desk::new("kvdepot-carried", 2),
            maps: Mutex::default(),
            targets: Mutex::default(),
            closing: Mutex::new(false),
            closed: Condvar::new(),
        }
    }

    pub(super) fn replicas(&self) -> usize {
        self.replicas
    }

    pub(super) fn net(&self) -> &Arc<Net> {
        &self.net
    }

    pub(super) fn view(&self) -> Arc<View> {
        self.membership.view()
    }

    /// This host's part of all that the hosts give together, of which each block takes several
    /// times its bytes.
    pub(super) fn part(&self) -> Option<(u64, u64)> {
        let view = self.view();
        let all: u64 = view.hosts().iter().map(|host| host.capacity).sum();
        let copies = self.replicas.min(view.hosts().len()).max(1) as u64;
        let own = &view.hosts()[view.find(&self.own)?];
        Some((own.capacity.saturating_mul(copies), all))
    }

    /// Looks after hosts that are down, and what others are owed, until all is closed.
    pub(super) fn watch(&self) {
        let mut closing = self.closing.lock();
        while !*closing {
            self.closed.wait_for(&mut closing, LOOK);
            let now = Instant::now();
            let (all, left) = {
                let mut targets = self.targets.lock();
                let is_left =
                    |target: &Arc<Target>| Arc::strong_count(target) == 1 && target.owes_nothing();
                let left: Vec<_> = targets.extract_if(|_, target| is_left(target)).collect();
                (targets.values().cloned().collect::<Vec<_>>(), left)
            };
            all.iter().for_each(|target| target.look(now));
            for ((_, address), target) in &left {
                target.end(now);
                // One that hangs still has what it was not told to end: it ends with the last
                // connection.
                let mut known = self
                    .targets
                    .lock()
                    .keys()
                    .cloned()
                    .collect::<Vec<_>>()
                    .into_iter();
                if known.all(|(_, other)| other != *address) {
                    self.net.engine.forget(*address);
                }
            }
        }
    }

    fn maps(&self) -> Arc<Maps> {
        let view = self.membership.view();
        let mut maps = self.maps.lock();
        if let Some(known) = maps
            .as_ref()
            .filter(|maps| Arc::ptr_eq(maps.now.view(), &view))
        {
            return Arc::clone(known);
        }
        let hosts = view
            .hosts()
            .iter()
            .map(|host| self.whom(&host.name, &host.address));
        let hosts: Vec<_> = hosts.collect();
        let last = maps.take();
        let last = last.filter(|maps| !maps.now.view().hosts().is_empty());
        let before = last.and_then(|maps| match are_same(maps.now.view(), &view) {
            // Who was a home still is.
            true => maps.before.clone(),
            false => Some(Arc::new(Maps {
                now: maps.now.clone(),
                before: None,
                hosts: maps.hosts.clone(),
            })),
        });
        let made = Arc::new(Maps {
            now: HomeMap::new(view, self.replicas),
            before,
            hosts,
        });
        *maps = Some(Arc::clone(&made));
        self.net.changes.fetch_add(1, Ordering::AcqRel);
        drop(maps);
        made
    }

    fn whom(&self, name: &str, address: &str) -> Option<Whom> {
        if name == self.own {
            return Some(Whom::Own);
        }
        let Ok(address) = address.parse() else {
            tracing::warn!(
                host = name,
                address,
                "host has no usable address; its blocks are misses"
            );
            return None;
        };
        let mut targets = self.targets.lock();
        let new = || {
            let wire = Wire::new(&self.net.engine, self.timeout, &self.finisher);
            Arc::new(Target::new(name, address, &self.net, wire))
        };
        let target = targets
            .entry((name.to_owned(), address))
            .or_insert_with(new);
        Some(Whom::Far(Arc::clone(target)))
    }

    /// How often hosts have changed, or one has answered again, so far.
    pub(super) fn changes(&self) -> u64 {
        let _known = self.maps();
        self.net.changes.load(Ordering::Acquire)
    }

    /// Where a block is to be, whether its homes answer or not.
    pub(super) fn homes(&self, name: &Identity) -> Homes {
        let maps = self.maps();
        let mut homes = Homes {
            is_own: false,
            is_stray: maps.now.view().find(&self.own).is_some(),
            far: Vec::new(),
        };
        for host in maps.now.homes(Point::of(&bytes_of(name))).iter() {
            match &maps.hosts[*host as usize] {
                Some(Whom::Far(target)) => homes.far.push(Arc::clone(target)),
                Some(Whom::Own) => homes.is_own = true,
                None => homes.is_stray = false,
            }
        }
        homes.is_stray &= !homes.is_own && !homes.far.is_empty();
        homes
    }

    /// Whether this host is one of those that all know.
    pub(super) fn is_known(&self) -> bool {
        self.maps().now.view().find(&self.own).is_some()
    }

    /// Hosts that a block may be put at, the best first: those that do not answer are passed over.
    /// No more than are asked for it later, whoever of them has it.
    pub(super) fn to_put(&self, name: &Identity) -> Vec<Whom> {
        let maps = self.maps();
        let point = Point::of(&bytes_of(name));
        let homes = maps.now.first(point, REPLICAS_MAX);
        let homes = homes
            .iter()
            .filter_map(|host| maps.hosts[*host as usize].clone());
        let most = self.replicas + ASKED_MAX - 1;
        homes.filter(is_up).take(most).collect()
    }

    /// Hosts that are asked for blocks, at most two each: the first home, then the one that was it
    /// before hosts came or went, or else the next in the order of homes.
    pub(super) fn to_ask<'a>(&self, names: impl Iterator<Item = &'a Identity>) -> Vec<Vec<Whom>> {
        let maps = self.maps();
        let ask = |name: &Identity| {
            let point = Point::of(&bytes_of(name));
            let mut asked: Vec<Whom> = Vec::with_capacity(ASKED_MAX);
            let mut push = |whom: &Option<Whom>| {
                if let Some(whom) = whom.as_ref().filter(|whom| is_up(whom))
                    && asked.len() < ASKED_MAX
                    && asked.iter().all(|other| other.number() != whom.number())
                {
                    asked.push(whom.clone());
                }
            };
            let homes = maps.now.first(point, REPLICAS_MAX);
            if let Some(first) = homes.first() {
                push(&maps.hosts[*first as usize]);
            }
            if let Some(before) = &maps.before {
                for host in before.now.homes(point).iter() {
                    push(&self.still(before, *host as usize, &maps));
                }
            }
            for host in homes.iter() {
                push(&maps.hosts[*host as usize]);
            }
            asked
        };
        names.map(ask).collect()
    }

    /// A host of the view before, as the view now has it.
    #[expect(clippy::unused_self, reason = "maps are its own")]
    fn still(&self, before: &Maps, host: usize, now: &Maps) -> Option<Whom> {
        let name = &before.now.view().hosts()[host].name;
        let there = now.now.view().find(name)?;
        now.hosts[there].clone()
    }

    /// All hosts of the view, also those that are down.
    pub(super) fn all(&self) -> Vec<Option<Whom>> {
        self.maps().hosts.clone()
    }

    /// Hosts that do not answer.
    pub(super) fn down(&self) -> usize {
        let targets = self.targets.lock();
        targets.values().filter(|target| target.is_down()).count()
    }

    /// Nobody is looked after any more.
    pub(super) fn begin_close(&self) {
        *self.closing.lock() = true;
        self.closed.notify_all();
    }

    /// Ends what is under way.
    pub(super) fn close(&self, deadline: Instant) {
        let left: Vec<_> = self
            .targets
            .lock()
            .drain()
            .map(|(_, target)| target)
            .collect();
        for target in &left {
            target.end(deadline);
        }
        self.finisher.end(deadline);
        let within = deadline.saturating_duration_since(Instant::now());
        let _or_not = self.membership.close(within);
        *self.maps.lock() = None;
    }
}

/// Whether homes are the same under two views.
fn are_same(one: &View, other: &View) -> bool {
    let named = |view: &View| -> Vec<(String, u64)> {
        let hosts = view.hosts().iter();
        hosts
            .map(|host| (host.name.clone(), host.capacity))
            .collect()
    };
    named(one) == named(other)
}

fn is_up(whom: &Whom) -> bool {
    match whom {
        Whom::Own => true,
        Whom::Far(target) => !target.is_down(),
    }
}
