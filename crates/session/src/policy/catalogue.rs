//! What is on disk: checkpoints and temporaries, and what a new one makes go.

use std::collections::BTreeMap;
use std::time::Duration;

use super::choose::{Entry, choose};

/// Checkpoints on disk, and other data that uses disk space.
///
/// # Examples
/// ```
/// use std::time::Duration;
///
/// use kvdepot_session::policy::{Catalogue, Entry, Reason};
///
/// let now = Duration::from_secs(1_800_000_000);
/// let mut catalogue = Catalogue::new();
/// for (id, parent, tokens) in [(1, None, 10_240), (2, Some(1), 20_480)] {
///     let (reason, bytes) = (Reason::Continued, 100);
///     catalogue.insert(Entry { id, parent, reason, tokens, bytes, hits: 0, used: now, pins: 0 });
/// }
/// // 200 of 250 bytes are in use. Checkpoint 1 is superseded by checkpoint 2.
/// assert_eq!(catalogue.make_room(100, 250, now), Some(vec![1]));
/// assert!(catalogue.pin(1)); // it is about to be loaded
/// assert_eq!(catalogue.make_room(100, 250, now), Some(vec![2]));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Catalogue {
    entries: BTreeMap<u64, Entry>,
    /// Bytes of saves under way, files that await their removal, and whatever else is there.
    other: BTreeMap<u64, u64>,
}

impl Catalogue {
    /// Creates an empty catalogue.
    #[must_use]
    pub fn new() -> Catalogue {
        Catalogue::default()
    }

    /// Adds a checkpoint, and replaces one with the same `id`.
    pub fn insert(&mut self, entry: Entry) {
        self.entries.insert(entry.id, entry);
    }

    /// Removes the checkpoint `id`, and returns it. The checkpoints that had it as their parent get
    /// its parent.
    pub fn remove(&mut self, id: u64) -> Option<Entry> {
        let gone = self.entries.remove(&id)?;
        for entry in self.entries.values_mut() {
            if entry.parent == Some(id) {
                entry.parent = gone.parent;
            }
        }
        Some(gone)
    }

    /// Returns the checkpoint `id`.
    #[must_use]
    pub fn get(&self, id: u64) -> Option<&Entry> {
        self.entries.get(&id)
    }

    /// Returns all checkpoints, in order of their IDs.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    /// Counts a restore of the checkpoint `id` at the time `now`. The checkpoint stays, regardless
    /// of its length.
    ///
    /// Returns false if there is no such checkpoint.
    pub fn hit(&mut self, id: u64, now: Duration) -> bool {
        let entry = self.entries.get_mut(&id);
        entry.is_some_and(|entry| {
            entry.hits += 1;
            entry.used = entry.used.max(now);
            true
        })
    }

    /// Adds a pin to the checkpoint `id`, which stays until all its pins are
    /// [released](Catalogue::unpin). For example, it is about to be loaded, or a save builds on it.
    ///
    /// Returns false if there is no such checkpoint.
    #[must_use = "what is not there is not pinned"]
    pub fn pin(&mut self, id: u64) -> bool {
        let entry = self.entries.get_mut(&id);
        entry.is_some_and(|entry| {
            entry.pins += 1;
            true
        })
    }

    /// Releases one pin of the checkpoint `id`. Returns false if it has no pin.
    pub fn unpin(&mut self, id: u64) -> bool {
        let entry = self.entries.get_mut(&id).filter(|entry| entry.pins > 0);
        entry.is_some_and(|entry| {
            entry.pins -= 1;
            true
        })
    }

    /// Records that other data uses `bytes` bytes on disk, under a number `id` of the caller's
    /// choice. With 0 bytes the data is removed.
    ///
    /// For example, a save in progress uses the bytes that it was granted, and an orphan its size.
    pub fn set_other(&mut self, id: u64, bytes: u64) {
        match bytes {
            0 => self.other.remove(&id),
            _ => self.other.insert(id, bytes),
        };
    }

    /// Returns the size of all data on disk, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let entries = self.entries.values().map(|entry| entry.bytes);
        let all = entries.chain(self.other.values().copied());
        all.fold(0, u64::saturating_add)
    }

    /// Selects checkpoints to delete, so that all remaining data and `incoming` bytes fit into
    /// `disk_space` bytes.
    ///
    /// Returns the IDs in the order of deletion. If that is impossible, returns `None`; then delete
    /// nothing, and do not save.
    #[must_use]
    pub fn make_room(&self, incoming: u64, disk_space: u64, now: Duration) -> Option<Vec<u64>> {
        let wanted = self.bytes().saturating_add(incoming);
        let entries: Vec<Entry> = self.entries.values().copied().collect();
        choose(&entries, wanted.saturating_sub(disk_space), now)
    }
}

#[cfg(test)]
mod tests {
    use super::super::answer::Reason;
    use super::*;

    const NOW: Duration = Duration::from_secs(1_800_000_000);

    fn chain(lens: &[u64]) -> Catalogue {
        let mut catalogue = Catalogue::new();
        for (at, tokens) in lens.iter().enumerate() {
            let id = at as u64 + 1;
            catalogue.insert(Entry {
                id,
                parent: (at > 0).then_some(id - 1),
                reason: Reason::Continued,
                tokens: *tokens,
                bytes: 100,
                hits: 0,
                used: NOW,
                pins: 0,
            });
        }
        catalogue
    }

    #[test]
    fn a_hit_removes_nothing_however_long_the_checkpoint() {
        let mut catalogue = chain(&[1_000_000]);
        assert!(catalogue.hit(1, NOW + Duration::from_secs(9)));
        let entry = catalogue.get(1).unwrap();
        assert_eq!((entry.hits, entry.used), (1, NOW + Duration::from_secs(9)));
        assert!(!catalogue.hit(2, NOW));
    }

    #[test]
    fn everything_on_disk_counts() {
        let mut catalogue = chain(&[10_240]);
        catalogue.set_other(7, 50);
        assert_eq!(catalogue.bytes(), 150);
        assert_eq!(catalogue.make_room(50, 200, NOW), Some(vec![]));
        assert_eq!(catalogue.make_room(51, 200, NOW), Some(vec![1]));
        assert_eq!(
            catalogue.make_room(151, 200, NOW),
            None,
            "the temporary stays"
        );
        catalogue.set_other(7, 0);
        assert_eq!(catalogue.bytes(), 100);
    }

    #[test]
    fn a_pin_holds_until_it_was_taken_back_as_often() {
        let mut catalogue = chain(&[10_240]);
        assert!(catalogue.pin(1) && catalogue.pin(1) && catalogue.unpin(1));
        assert_eq!(catalogue.make_room(1, 100, NOW), None);
        assert!(catalogue.unpin(1) && !catalogue.unpin(1));
        assert_eq!(catalogue.make_room(1, 100, NOW), Some(vec![1]));
        assert!(!catalogue.pin(9) && !catalogue.unpin(9));
    }

    #[test]
    fn a_checkpoint_is_superseded_also_where_the_one_between_is_gone() {
        let mut catalogue = chain(&[10_240, 20_480, 30_720]);
        assert!(catalogue.remove(2).is_some());
        assert_eq!(catalogue.get(3).unwrap().parent, Some(1));
        // The longer one would go first by its score.
        catalogue.hit(1, NOW);
        assert_eq!(catalogue.make_room(1, 200, NOW), Some(vec![1]));
    }
}
