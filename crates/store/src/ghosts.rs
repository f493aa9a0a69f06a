//! What passed by lately and has not been asked for since: a fixed table of fingerprints.
//!
//! A block that is noted here as stored and is in no tier any more has left unread. Fingerprints
//! may be those of others, and old ones make room for new ones, so it is good for advice only:
//! nothing is served by it. Lock-free: whoever comes at the same moment may undo what the other
//! noted. It lives as long as its depot, and a new one knows nothing.
//!
//! ```text
//!   63                  26 25    21   20  19                 0
//!  |     fingerprint      | class | done |  when it was noted  |
//! ```

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

use kvdepot_arena::{Key, NamespaceId};
use kvdepot_host::cpu::prefetch;

/// Entries of a bucket: a cache line.
const WAYS: usize = 8;
/// Fewest buckets, in which hardly one overflows, and most: 64 KiB and 32 MiB.
const BUCKETS_MIN: u64 = 1 << 10;
const BUCKETS_MAX: u64 = 1 << 19;
/// Bits of an entry that say when it was noted.
const AGE_BITS: u32 = 20;
const AGES: u64 = (1 << AGE_BITS) - 1;
/// The next one: whether the block was stored, or declined.
const DONE: u64 = 1 << AGE_BITS;
/// The next ones: what kind of block it is.
const CLASS_SHIFT: u32 = AGE_BITS + 1;
const CLASS_BITS: u32 = 5;
/// The others are the fingerprint.
const PRINT_SHIFT: u32 = CLASS_SHIFT + CLASS_BITS;
const PRINT: u64 = !0 << PRINT_SHIFT;

/// Kinds of blocks that are told apart.
pub(crate) const CLASSES: usize = 1 << CLASS_BITS;
/// Steps of the clock while as many bytes pass by as the tier holds.
pub(crate) const ROUND: u64 = 1 << 10;

#[repr(align(64))]
#[derive(Default)]
struct Bucket([AtomicU64; WAYS]);

/// The table.
pub(crate) struct Ghosts {
    buckets: Vec<Bucket>,
    /// Words that nobody else knows, one for each of an identity.
    secret: [u64; 6],
    /// Bytes that have passed by, and how many of them are one step.
    noted: AtomicU64,
    step: u64,
}

impl Ghosts {
    /// For a tier of so many bytes that has so many blocks at most, and as many that have left.
    pub(crate) fn new(blocks: u64, bytes: u64) -> Ghosts {
        let count = (2 * blocks)
            .div_ceil(WAYS as u64)
            .clamp(BUCKETS_MIN, BUCKETS_MAX);
        let random = RandomState::new();
        let mut buckets = Vec::new();
        buckets.resize_with(count as usize, Bucket::default);
        Ghosts {
            buckets,
            secret: std::array::from_fn(|word| random.hash_one(word)),
            noted: AtomicU64::new(0),
            step: (bytes / ROUND).max(1),
        }
    }

    /// The time: steps since the beginning.
    pub(crate) fn now(&self) -> u64 {
        self.noted.load(Ordering::Relaxed) / self.step
    }

    /// Notes that a block was offered, of this class, and whether that is all of it (`done`), or it
    /// is yet to be stored. False for one that is noted already: then it stays what it was.
    pub(crate) fn offered(
        &self,
        namespace: NamespaceId,
        key: &Key,
        bytes: u64,
        class: u8,
        done: bool,
    ) -> bool {
        let (bucket, print) = self.place(namespace, key);
        let done = if done { DONE } else { 0 };
        if let Some(entry) = find(bucket, print) {
            if done != 0 {
                entry.fetch_or(done, Ordering::Relaxed);
            }
            return false;
        }
        let noted = self.noted.fetch_add(bytes, Ordering::Relaxed);
        let now = noted / self.step;
        let age = |at: &&AtomicU64| match at.load(Ordering::Relaxed) {
            0 => u64::MAX,
            entry => now.wrapping_sub(entry) & AGES,
        };
        if let Some(oldest) = bucket.iter().max_by_key(age) {
            let class = u64::from(class) << CLASS_SHIFT;
            oldest.store(print | class | done | (now & AGES), Ordering::Relaxed);
        }
        true
    }

    /// Has the processor fetch what is known of blocks, each of which lies far from the others.
    pub(crate) fn fetch<'a>(&self, namespace: NamespaceId, keys: impl Iterator<Item = &'a Key>) {
        keys.for_each(|key| prefetch(self.place(namespace, key).0));
    }

    /// Takes a block out: its class, and for how many steps it was noted.
    pub(crate) fn take(&self, namespace: NamespaceId, key: &Key) -> Option<(u8, u64)> {
        let (bucket, print) = self.place(namespace, key);
        let entry = find(bucket, print)?;
        let there = entry.load(Ordering::Relaxed);
        let same = there & PRINT == print;
        // One that another call has put there meanwhile stays.
        let taken = same
            && entry
                .compare_exchange(there, 0, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        let class = (there >> CLASS_SHIFT) as u8 & (CLASSES as u8 - 1);
        taken.then(|| (class, self.now().wrapping_sub(there) & AGES))
    }

    /// Whether a block was stored or declined, and nobody has asked for it since.
    pub(crate) fn has(&self, namespace: NamespaceId, key: &Key) -> bool {
        self.noted(namespace, key) == Some(true)
    }

    /// What is known of a block: whether it is `done`; `None` where it is not noted.
    pub(crate) fn noted(&self, namespace: NamespaceId, key: &Key) -> Option<bool> {
        let (bucket, print) = self.place(namespace, key);
        find(bucket, print).map(|entry| entry.load(Ordering::Relaxed) & DONE != 0)
    }

    /// Forgets all.
    pub(crate) fn clear(&self) {
        let entries = self.buckets.iter().flat_map(|bucket| &bucket.0);
        entries.for_each(|entry| entry.store(0, Ordering::Relaxed));
    }

    /// The bucket of an identity, and its fingerprint, which is not zero.
    fn place(&self, namespace: NamespaceId, key: &Key) -> (&[AtomicU64; WAYS], u64) {
        let (spaces, _) = namespace.0.as_chunks::<8>();
        let (words, _) = key.0.as_chunks::<8>();
        let mut all = spaces.iter().chain(words).zip(&self.secret);
        let mut word = || {
            let (bytes, secret) = all.next()?;
            Some(u64::from_le_bytes(*bytes) ^ secret)
        };
        let mut hash = 0_u64;
        while let (Some(a), Some(b)) = (word(), word()) {
            let product = u128::from(a) * u128::from(b);
            hash = hash.rotate_left(23) ^ product as u64 ^ (product >> 64) as u64;
        }
        // Keys that count up shall not lie in few places, whatever the secret is (splitmix64).
        hash = (hash ^ (hash >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        hash ^= hash >> 27;
        let count = self.buckets.len() as u64;
        let at = ((u128::from(hash) * u128::from(count)) >> 64) as usize;
        // The low bits, which do not choose the bucket.
        let print = (hash << PRINT_SHIFT).max(1 << PRINT_SHIFT);
        (&self.buckets[at].0, print)
    }
}

fn find(bucket: &[AtomicU64; WAYS], print: u64) -> Option<&AtomicU64> {
    let same = |entry: &&AtomicU64| entry.load(Ordering::Relaxed) & PRINT == print;
    bucket.iter().find(same)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMESPACE: NamespaceId = NamespaceId([1; 16]);

    fn key(number: u64) -> Key {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&number.to_le_bytes());
        Key(key)
    }

    #[test]
    fn what_was_noted_last_is_known_until_it_is_taken_out() {
        let ghosts = Ghosts::new(1000, 1000 << 12);
        for number in 0..100_000 {
            assert!(ghosts.offered(NAMESPACE, &key(number), 1 << 12, 7, number % 2 == 0));
            assert!(!ghosts.offered(NAMESPACE, &key(number), 1 << 12, 8, true));
        }
        let known = |from: u64, to: u64| {
            let known = (from..to).filter(|number| ghosts.has(NAMESPACE, &key(*number)));
            known.count()
        };
        assert!(known(99_000, 100_000) > 950, "{}", known(99_000, 100_000));
        assert_eq!(known(0, 50_000), 0);
        assert!(!ghosts.has(NamespaceId([2; 16]), &key(99_999)));
        assert_eq!(ghosts.take(NAMESPACE, &key(99_998)).unwrap().0, 7);
        assert_eq!(ghosts.take(NAMESPACE, &key(5)), None);
        assert!(!ghosts.has(NAMESPACE, &key(99_998)) && ghosts.has(NAMESPACE, &key(99_999)));
        ghosts.clear();
        assert_eq!(known(0, 100_000), 0);
    }

    #[test]
    fn time_is_what_passed_by_over_what_the_tier_holds() {
        let ghosts = Ghosts::new(1000, 1000 << 12);
        for number in 0..1000 {
            ghosts.offered(NAMESPACE, &key(number), 1 << 12, 0, false);
        }
        assert_eq!(ghosts.now(), ROUND);
        let (_, half) = ghosts.take(NAMESPACE, &key(500)).unwrap();
        assert_eq!(half, ROUND / 2);
        assert!(!ghosts.has(NAMESPACE, &key(501)), "it is not stored yet");
    }
}
