//! A shelf as the store asks it.

use std::sync::Arc;

use kvdepot_arena::{Cause, Full, Place, Refused, Reserved, Token, Wanted};
use kvdepot_media::Checksum;
use kvdepot_store::{Ends, Key, Kinds, NamespaceId, Page, Reply, Tier, TierKind, TierStats};

use super::posix::OnDisk;
use super::shelf::{Kind, Shelf};

/// Blocks of a page of a listing.
const PAGE: usize = 7;

/// The kinds of these shelves.
pub fn kinds(shelves: &[Arc<Shelf>]) -> Kinds {
    let standard = Kinds::standard();
    shelves.iter().fold(Kinds::new(), |kinds, shelf| {
        let (name, shelf) = (shelf.name, Arc::clone(shelf));
        let inner = standard.find(name).cloned();
        kinds.with(TierKind {
            name,
            options: inner.as_ref().map_or(&[], |inner| inner.options),
            check: |_, _| Ok(()),
            open: Arc::new(move |section, terms| {
                shelf.opened(terms.number);
                if let Some(inner) = &inner {
                    shelf.opened_on(OnDisk {
                        tier: (inner.open)(section, terms)?,
                    });
                }
                Ok(Arc::new(Apart(Arc::clone(&shelf))))
            }),
        })
    })
}

struct Apart(Arc<Shelf>);

/// What nobody gets holds nothing, or gives it back by itself.
fn nothing<T>(_: &Arc<Shelf>, _: T) {}

impl Tier for Apart {
    fn name(&self) -> &'static str {
        self.0.name
    }

    fn lasts(&self) -> bool {
        self.0.lasts
    }

    fn block_max(&self) -> u64 {
        self.0.block_max
    }

    fn probe(&self, namespace: NamespaceId, keys: &[Key], reply: Reply<Vec<bool>>) {
        let keys = keys.to_vec();
        let does = move |shelf: &Arc<Shelf>| {
            if let Some(disk) = shelf.disk() {
                return disk.probe(namespace, &keys);
            }
            let each = keys.iter().map(|key| shelf.knows(namespace, *key));
            each.collect()
        };
        self.0.answer((reply, Kind::Lookup), does, nothing);
    }

    fn pin(
        &self,
        namespace: NamespaceId,
        keys: &[Key],
        _used: &[u64],
        reply: Reply<Vec<Option<Place>>>,
    ) {
        let keys = keys.to_vec();
        let does = move |shelf: &Arc<Shelf>| {
            let each = keys.iter().map(|key| shelf.find(namespace, *key));
            each.collect()
        };
        self.0
            .answer((reply, Kind::Lookup), does, |shelf, places: Vec<_>| {
                let places = places.iter().flatten();
                shelf.unpin(places.map(|place: &Place| place.token));
            });
    }

    fn unpin(&self, places: &[Place]) {
        self.0.unpin(places.iter().map(|place| place.token));
    }

    fn discard(&self, places: &[Place], reply: Reply<usize>) {
        // What is pinned now, whenever it goes.
        let does = self.0.discards(places);
        self.0.answer((reply, Kind::Discard), does, nothing);
    }

    fn reserve(
        &self,
        namespace: NamespaceId,
        blocks: &[Wanted],
        reply: Reply<Vec<Result<Reserved, Refused>>>,
    ) {
        let blocks = blocks.to_vec();
        let does = move |shelf: &Arc<Shelf>| {
            let each = blocks.iter().map(|one| make(shelf, namespace, one));
            each.collect()
        };
        self.0.answer((reply, Kind::Other), does, nothing);
    }

    fn commit(&self, written: Vec<(Reserved, Checksum)>, pinned: bool, reply: Reply<Vec<bool>>) {
        self.0.publishes(&written);
        let tokens = written.iter().map(|(reserved, _)| reserved.token);
        let tokens: Vec<Token> = tokens.collect();
        let does = move |shelf: &Arc<Shelf>| {
            let each = written.into_iter();
            let each = each.map(|(reserved, sum)| shelf.publish(reserved, sum, pinned));
            each.collect()
        };
        self.0.answer(
            (reply, Kind::Other),
            does,
            move |shelf, stored: Vec<bool>| {
                let pins = tokens.into_iter().zip(stored);
                let pins = pins.filter(|(_, stored)| pinned && *stored);
                shelf.unpin(pins.map(|(token, _)| token));
            },
        );
    }

    fn remove(&self, namespace: NamespaceId, keys: &[Key], reply: Reply<Vec<bool>>) {
        let keys = keys.to_vec();
        let removal = self.0.removes(namespace, Some(&keys));
        let does = move |shelf: &Arc<Shelf>| {
            let removed = shelf.remove(namespace, &keys);
            drop(removal);
            removed
        };
        self.0.answer((reply, Kind::Other), does, nothing);
    }

    fn clear(&self, namespace: NamespaceId, reply: Reply<usize>) {
        let removal = self.0.removes(namespace, None);
        let does = move |shelf: &Arc<Shelf>| {
            let cleared = shelf.clear(namespace);
            drop(removal);
            cleared
        };
        self.0.answer((reply, Kind::Other), does, nothing);
    }

    fn list(&self, namespace: NamespaceId, from: u64, limit: usize, reply: Reply<Page>) {
        let limit = limit.min(PAGE);
        let does = move |shelf: &Arc<Shelf>| {
            let all = shelf.all(namespace);
            let page = all.iter().skip(from as usize).take(limit).copied();
            let next = from + limit as u64;
            (
                page.collect(),
                Some(next).filter(|next| *next < all.len() as u64),
            )
        };
        self.0.answer((reply, Kind::Other), does, nothing);
    }

    fn describe(&self, _: NamespaceId, _: &str) {}

    fn stats(&self) -> TierStats {
        let mut stats = TierStats::new(self.0.name);
        (stats.pinned_blocks, stats.reserved_blocks) = self.0.held();
        stats
    }

    fn ends(&self) -> Arc<dyn Ends> {
        Arc::clone(&self.0) as _
    }

    fn close(&self) {
        self.0.closed();
    }
}

fn make(shelf: &Arc<Shelf>, namespace: NamespaceId, one: &Wanted) -> Result<Reserved, Refused> {
    if shelf.knows(namespace, one.key) {
        return Err(Refused::Present(shelf.nowhere()));
    }
    if shelf.refuses() {
        let full = Full {
            tier: shelf.name,
            requested: one.len,
            cause: Cause::Leaving,
        };
        return Err(match one.len % 2 {
            0 => Refused::Declined,
            _ => Refused::Full(full),
        });
    }
    shelf.make(namespace, one)
}
