//! The one who collects, by a *lease* that it renews: one that was killed keeps the others waiting
//! for seconds.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::FutureExt;
use object_store::{ObjectMeta, ObjectStoreExt, PutMode, UpdateVersion};
use parking_lot::Mutex;
use tokio::time::sleep;

use super::{COUNT, Count, LEASE, Look, SILENT, Usage};
use crate::tier::s3::bucket::{Fault, Way};
use crate::tier::s3::uses::StoreTime;

/// How long one who collects is believed to, and how often it says that it does. Times of some
/// stores are of whole seconds.
const LEASE_TIME: Duration = Duration::from_secs(6);
const LEASE_BEAT: Duration = Duration::from_secs(2);

/// Whoever collects: what was settled when that began.
pub(crate) struct Collecting {
    /// What was announced beyond that.
    pub(crate) left: u64,
    settled: HashMap<String, u64>,
    silent: Vec<String>,
    /// The store's clock.
    pub(crate) time: StoreTime,
    now: i64,
    turnover: Option<u64>,
    /// `None` where another one has it, and nobody has counted yet.
    lease: Option<Lease>,
}

impl Collecting {
    /// Whether this process has nothing to count by but what one page lists.
    pub(crate) fn has_no_lease(&self) -> bool {
        self.lease.is_none()
    }

    /// Whether another one collects by now.
    pub(crate) fn is_over(&self) -> bool {
        self.lease.as_ref().is_some_and(Lease::is_lost)
    }
}

/// What a count has found, and is there no more.
pub(crate) struct Counted {
    pub(crate) bytes: u64,
    pub(crate) turnover: Option<u64>,
    pub(crate) took: Duration,
}

/// The right to collect, by a version of its object.
struct Lease {
    e_tag: Mutex<Option<String>>,
    /// Another one has taken it.
    lost: AtomicBool,
}

impl Lease {
    fn new(e_tag: Option<String>) -> Lease {
        Lease {
            e_tag: Mutex::new(e_tag),
            lost: AtomicBool::new(false),
        }
    }

    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }
}

/// On the condition that it is that version still, where it has one.
fn update(e_tag: Option<String>) -> PutMode {
    match e_tag {
        Some(e_tag) => PutMode::Update(UpdateVersion {
            e_tag: Some(e_tag),
            version: None,
        }),
        None => PutMode::Overwrite,
    }
}

impl Usage {
    /// Begins to collect, unless another one does; what this process has settled is said before.
    pub(crate) async fn collect(&self) -> Result<Option<Collecting>, Fault> {
        let mut others = self.others.lock().await;
        let granted = self.mine.lock().granted;
        self.say(granted).await?;
        let look = self.look(&mut others).await?;
        let lease = self.lease(&look).await?;
        if lease.is_none() && look.count.is_some() {
            return Ok(None);
        }
        let settled = look.all.iter();
        let settled = settled.map(|(name, said, _)| (name.clone(), said.settled));
        // One of the future lives: what it has is used.
        let long_ago = look.now.saturating_sub_unsigned(SILENT.as_secs());
        let is_silent = |meta: &ObjectMeta| meta.last_modified.timestamp() < long_ago;
        let (silent, live): (Vec<_>, Vec<_>) = look
            .all
            .iter()
            .partition(|(name, _, meta)| *name != self.me && is_silent(meta));
        let left = live.iter();
        let left = left.map(|(_, said, _)| said.announced.saturating_sub(said.settled));
        let time = self.mine.lock().time;
        Ok(Some(Collecting {
            left: left.fold(0, u64::saturating_add),
            settled: settled.collect(),
            silent: silent.iter().map(|(name, ..)| name.clone()).collect(),
            time: time.ok_or(Fault::Lost)?,
            now: look.now,
            turnover: look.count.and_then(|count| count.turnover),
            lease,
        }))
    }

    /// Takes the lease, unless another one has it.
    async fn lease(&self, look: &Look) -> Result<Option<Lease>, Fault> {
        let mode = match &look.lease {
            None => PutMode::Create,
            Some(lease) if look.age_of(lease) < LEASE_TIME => return Ok(None),
            Some(lease) => {
                let head = || self.bucket.store().head(&lease.location).boxed();
                match self.bucket.ask_for(Way::Write, head).await? {
                    // It may have been renewed since it was listed.
                    Some(lease) if look.age_of(&lease) < LEASE_TIME => return Ok(None),
                    Some(lease) => update(lease.e_tag),
                    None => PutMode::Create,
                }
            }
        };
        match self.put(LEASE, &self.me, mode).await {
            Ok(e_tag) => Ok(Some(Lease::new(e_tag))),
            Err(Fault::Taken | Fault::Changed) => Ok(None),
            // A store without conditions: two who collect at once find the same.
            Err(Fault::Unknown) => {
                let e_tag = self.put(LEASE, &self.me, PutMode::Overwrite).await?;
                Ok(Some(Lease::new(e_tag)))
            }
            Err(fault) => Err(fault),
        }
    }

    /// Says again and again that this process collects, until that is not so.
    pub(crate) async fn renew(&self, by: &Collecting) -> Infallible {
        loop {
            sleep(LEASE_BEAT).await;
            let Some(lease) = by.lease.as_ref().filter(|lease| !lease.is_lost()) else {
                continue;
            };
            let e_tag = lease.e_tag.lock().clone();
            match self.put(LEASE, &self.me, update(e_tag)).await {
                Ok(e_tag) => *lease.e_tag.lock() = e_tag,
                Err(Fault::Unknown) => {
                    let _later = self.put(LEASE, &self.me, PutMode::Overwrite).await;
                }
                Err(Fault::Changed | Fault::Taken | Fault::Gone) => {
                    // It is this process's still where an answer was lost.
                    match self.holder().await {
                        Ok(Some((who, e_tag))) if who == self.me => *lease.e_tag.lock() = e_tag,
                        Ok(_) => lease.lost.store(true, Ordering::Relaxed),
                        Err(_later) => {}
                    }
                }
                Err(_later) => {}
            }
        }
    }

    /// Who has the lease, by which version of it.
    async fn holder(&self) -> Result<Option<(String, Option<String>)>, Fault> {
        let found = self.read(&self.path(LEASE)).await?;
        Ok(found.and_then(|(bytes, e_tag)| Some((serde_json::from_slice(&bytes).ok()?, e_tag))))
    }

    /// Says what has been found, and is there no more; what has ended long ago is forgotten.
    pub(crate) async fn found(&self, by: &Collecting, found: Counted) -> Result<(), Fault> {
        let Counted {
            bytes,
            turnover,
            took,
        } = found;
        let mut count = Count {
            bytes,
            settled: by.settled.clone(),
            at: by.now.saturating_add_unsigned(took.as_secs()),
            took: took.as_secs(),
            turnover: turnover.or(by.turnover),
        };
        // What they have written was found.
        for name in &by.silent {
            let path = self.path(name);
            let gone = self.remove(&path).await;
            if gone.is_ok() {
                count.settled.remove(name);
            }
        }
        self.put(COUNT, &count, PutMode::Overwrite).await?;
        let mut mine = self.mine.lock();
        (mine.seen, mine.turnover) = (bytes, count.turnover);
        Ok(())
    }

    /// Lets others collect.
    pub(crate) async fn ended(&self, by: &Collecting) {
        if by.lease.as_ref().is_some_and(|lease| !lease.is_lost()) {
            let _others_wait_until_it_is_old = self.remove(&self.path(LEASE)).await;
        }
    }
}
