//! What to remove where disk is short: what saves the least compute a byte.

use std::collections::HashSet;
use std::time::Duration;

use super::answer::Reason;

/// ds4's: a hit of this morning says half as much in the afternoon. In seconds.
const HIT_HALF_LIFE_SECS: f64 = 6.0 * 3600.0;

/// ds4's: those were taken for others to begin with, or as a conversation's last; a continued one
/// is a stop on the way, and about to be superseded.
const LASTING_WEIGHT: f64 = 2.0;

/// Checkpoint on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// ID of the checkpoint.
    pub id: u64,
    /// ID of the longest checkpoint in the catalogue whose tokens are a proper prefix of this
    /// one's.
    pub parent: Option<u64>,
    /// Cause of the checkpoint.
    pub reason: Reason,
    /// Number of tokens.
    pub tokens: u64,
    /// Bytes that a deletion frees, without blocks that other checkpoints share.
    pub bytes: u64,
    /// Number of restores.
    pub hits: u64,
    /// Time of the last save or restore, since the Unix epoch.
    pub used: Duration,
    /// Number of restores and saves that need the checkpoint now.
    pub pins: u32,
}

/// Returns the compute that a checkpoint saves per byte, in tokens.
///
/// Recent and frequent restores raise the score, and so does a small size for the number of tokens.
/// The score is infinite if a deletion frees nothing.
#[must_use]
pub fn score(entry: &Entry, now: Duration) -> f64 {
    let age = now.saturating_sub(entry.used).as_secs_f64();
    let hits = entry.hits as f64 * (-age / HIT_HALF_LIFE_SECS).exp2();
    let weight = match entry.reason {
        Reason::Continued => 1.0,
        Reason::Cold | Reason::Evict | Reason::Shutdown => LASTING_WEIGHT,
    };
    match entry.bytes {
        0 => f64::INFINITY,
        bytes => weight * (hits + 1.0) * entry.tokens as f64 / bytes as f64,
    }
}

/// Selects checkpoints to delete so that at least `needed` bytes become free, and returns their IDs
/// in the order of deletion.
///
/// * Continued checkpoints that a longer one of the same conversation supersedes come first,
///   regardless of their score.
/// * All others follow by their [`score`], lowest first. Of two with equal scores, the one used
///   earlier comes first.
/// * A checkpoint that need not be deleted is not selected. A pinned checkpoint is never selected.
///
/// Returns `None` if all checkpoints that may be deleted free too few bytes; then delete nothing.
#[must_use]
pub fn choose(entries: &[Entry], needed: u64, now: Duration) -> Option<Vec<u64>> {
    if needed == 0 {
        return Some(Vec::new());
    }
    let parents: HashSet<u64> = entries.iter().filter_map(|entry| entry.parent).collect();
    let is_last = |entry: &Entry| entry.reason != Reason::Continued || !parents.contains(&entry.id);
    let may_go = |entry: &&Entry| entry.pins == 0 && entry.bytes > 0;
    let rank = |entry| (is_last(entry), score(entry, now), entry);
    let mut ranked: Vec<(bool, f64, &Entry)> = entries.iter().filter(may_go).map(rank).collect();
    ranked.sort_unstable_by(|one, other| {
        let by_worth = one.0.cmp(&other.0).then(one.1.total_cmp(&other.1));
        by_worth.then_with(|| (one.2.used, one.2.id).cmp(&(other.2.used, other.2.id)))
    });
    let mut freed = 0_u64;
    let mut chosen = Vec::new();
    for (_, _, entry) in ranked {
        if freed >= needed {
            break;
        }
        freed = freed.saturating_add(entry.bytes);
        chosen.push(entry);
    }
    if freed < needed {
        return None;
    }
    // The last one may have freed so much that others, the worthiest of them first, can stay.
    let mut spare = freed - needed;
    let mut goes = |entry: &&Entry| {
        let stays = entry.bytes <= spare;
        spare -= if stays { entry.bytes } else { 0 };
        !stays
    };
    let gone: Vec<&Entry> = chosen
        .into_iter()
        .rev()
        .filter(|entry| goes(entry))
        .collect();
    Some(gone.into_iter().rev().map(|entry| entry.id).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1_800_000_000);
    const HALF_LIFE: Duration = Duration::from_secs(6 * 3600);

    fn entry(id: u64, reason: Reason) -> Entry {
        Entry {
            id,
            parent: None,
            reason,
            tokens: 1000,
            bytes: 100,
            hits: 0,
            used: NOW,
            pins: 0,
        }
    }

    #[test]
    fn hits_fade_by_half_in_six_hours() {
        let mut entry = entry(1, Reason::Continued);
        assert_eq!(score(&entry, NOW), 10.0);
        entry.hits = 4;
        assert_eq!(score(&entry, NOW), 50.0);
        entry.used = NOW - HALF_LIFE;
        assert_eq!(score(&entry, NOW), 30.0);
        entry.used = NOW + HALF_LIFE;
        assert_eq!(score(&entry, NOW), 50.0, "a clock that was set back");
        entry.used = Duration::ZERO;
        assert_eq!(score(&entry, NOW), 10.0);
    }

    #[test]
    fn cold_evict_and_shutdown_checkpoints_count_twice() {
        for reason in [Reason::Cold, Reason::Evict, Reason::Shutdown] {
            assert_eq!(score(&entry(1, reason), NOW), 20.0);
        }
    }

    #[test]
    fn superseded_continued_checkpoints_go_first() {
        let mut long = entry(2, Reason::Evict);
        long.parent = Some(1);
        let mut short = entry(1, Reason::Continued);
        short.hits = 100;
        let entries = [entry(3, Reason::Continued), long, short];
        assert_eq!(choose(&entries, 50, NOW), Some(vec![1]));
        assert_eq!(choose(&entries, 150, NOW), Some(vec![1, 3]));
    }

    #[test]
    fn a_cold_checkpoint_that_a_conversation_grew_from_is_not_superseded() {
        let mut grown = entry(2, Reason::Continued);
        grown.parent = Some(1);
        assert_eq!(
            choose(&[entry(1, Reason::Cold), grown], 1, NOW),
            Some(vec![2])
        );
    }

    #[test]
    fn the_file_that_is_about_to_be_loaded_stays() {
        let mut loading = entry(1, Reason::Continued);
        loading.pins = 1;
        let other = entry(2, Reason::Cold);
        assert_eq!(choose(&[loading, other], 1, NOW), Some(vec![2]));
        assert_eq!(
            choose(&[loading, other], 101, NOW),
            None,
            "nothing goes in vain"
        );
    }

    #[test]
    fn what_need_not_go_stays() {
        let mut large = entry(2, Reason::Cold);
        (large.bytes, large.tokens) = (1000, 50_000);
        let small = entry(1, Reason::Continued);
        assert_eq!(choose(&[small, large], 900, NOW), Some(vec![2]));
        assert_eq!(choose(&[small, large], 1050, NOW), Some(vec![1, 2]));
        assert_eq!(choose(&[small, large], 0, NOW), Some(vec![]));
    }

    #[test]
    fn of_equals_the_one_goes_that_was_used_earlier() {
        let mut early = entry(9, Reason::Cold);
        early.used = NOW - Duration::from_secs(1);
        assert_eq!(
            choose(&[entry(1, Reason::Cold), early], 1, NOW),
            Some(vec![9])
        );
    }

    #[test]
    fn what_gives_no_bytes_back_is_not_removed() {
        let mut shared = entry(1, Reason::Continued);
        shared.bytes = 0;
        assert_eq!(choose(&[shared], 1, NOW), None);
    }
}
