//! From keys to the numbers of their entries.
//!
//! A hash table that holds no keys: a word of four bytes for each block, a part of its hash above
//! its number. Words lie in lines of the processor's caches, so that a lookup reads one line here,
//! mostly, and then the entry of its key and hardly ever another one. A line counts the blocks that
//! belong to it or to one before and found no room in it: where there are none, a search ends.
//!
//! A table is in segments, each of which grows by itself, so that nobody waits for more than some
//! thousand words to move.

use kvdepot_host::cpu::prefetch;

/// Bits of a slot that count within its shard.
pub(super) const LOCAL_BITS: u32 = 28;

/// Words of a line, but for its count.
const ROOM: usize = 15;

/// Blocks of a segment where all records are in use: what moves in some tens of microseconds. Fewer
/// would differ more in how many they have.
const SEGMENT: u64 = 2048;

/// How full a segment is then: seven eighths.
const FULL: (u64, u64) = (7, 8);

#[derive(Clone)]
#[repr(C, align(64))]
struct Line {
    words: [u32; ROOM],
    /// Blocks that a search passes here on its way to a later line.
    passed: u32,
}

const _: () = assert!(size_of::<Line>() == 64);

impl Line {
    const EMPTY: Line = Line {
        words: [0; ROOM],
        passed: 0,
    };

    /// The words with a tag, a bit each. No branch here depends on what they are.
    #[inline]
    fn matches(&self, tag: u32, numbers: u32) -> u32 {
        let each = self.words.iter().enumerate();
        let bit = |(at, word): (usize, &u32)| u32::from((word ^ tag) & !numbers == 0) << at;
        each.map(bit).fold(0, |hits, bit| hits | bit)
    }
}

#[derive(Default)]
struct Segment {
    lines: Box<[Line]>,
    count: u32,
}

impl Segment {
    fn of(lines: usize) -> Segment {
        Segment {
            lines: vec![Line::EMPTY; lines].into(),
            count: 0,
        }
    }

    /// The line of a hash, scaled to their number.
    #[inline]
    fn home(&self, rest: u32) -> usize {
        ((u64::from(rest) * self.lines.len() as u64) >> 32) as usize
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        if at + 1 == self.lines.len() {
            0
        } else {
            at + 1
        }
    }

    /// Searches beyond this would pass too many lines.
    fn is_full(&self) -> bool {
        32 * self.count as usize >= 31 * ROOM * self.lines.len()
    }

    /// Enters a word; there is room for it.
    fn put(&mut self, rest: u32, word: u32) {
        let mut at = self.home(rest);
        loop {
            let line = &mut self.lines[at];
            if let Some(free) = line.words.iter_mut().find(|word| **word == 0) {
                *free = word;
                self.count += 1;
                return;
            }
            line.passed += 1;
            at = self.after(at);
        }
    }

    /// Takes a word out, if it is there.
    fn take(&mut self, rest: u32, word: u32) {
        let home = self.home(rest);
        let mut at = home;
        let has = |line: &mut Line| line.words.iter().position(|other| *other == word);
        for _ in 0..self.lines.len() {
            if let Some(found) = has(&mut self.lines[at]) {
                self.lines[at].words[found] = 0;
                self.count -= 1;
                let mut passed = home;
                while passed != at {
                    self.lines[passed].passed -= 1;
                    passed = self.after(passed);
                }
                return;
            }
            at = self.after(at);
        }
    }
}

/// Numbers by the hashes of their keys.
pub(super) struct Map {
    segments: Vec<Segment>,
    /// Bits of a word that are its number.
    numbers: u32,
    /// Lines of a segment where all records are in use.
    lines: usize,
}

impl Map {
    /// For about so many blocks.
    pub(super) fn new(blocks: u64) -> Map {
        let segments = blocks.div_ceil(SEGMENT).max(1);
        let each = blocks.div_ceil(segments) * FULL.1 / FULL.0;
        Map {
            segments: std::iter::repeat_with(Segment::default)
                .take(segments as usize)
                .collect(),
            numbers: (2 * blocks.max(1)).next_power_of_two().min(1 << LOCAL_BITS) as u32 - 1,
            lines: (each as usize / ROOM).max(1),
        }
    }

    /// How many numbers there are.
    pub(super) fn numbers(&self) -> u32 {
        self.numbers + 1
    }

    /// Where a hash belongs: the segment, and what tells its line.
    #[inline]
    fn place(&self, hash: u64) -> (usize, u32) {
        let scaled = u64::from((hash >> 16) as u32) * self.segments.len() as u64;
        ((scaled >> 32) as usize, scaled as u32)
    }

    /// What a word has above its number: never nothing, as an empty word.
    #[inline]
    fn tag(&self, hash: u64) -> u32 {
        let tag = hash as u32 & !self.numbers;
        if tag == 0 { self.numbers + 1 } else { tag }
    }

    /// Has the processor fetch what a search will begin with.
    #[inline]
    pub(super) fn fetch(&self, hash: u64) {
        let (segment, rest) = self.place(hash);
        let segment = &self.segments[segment];
        if let Some(line) = segment.lines.get(segment.home(rest)) {
            prefetch(line);
        }
    }

    /// The number for which `is_it` answers true, of those that may be the hash's.
    #[inline]
    pub(super) fn find(&self, hash: u64, mut is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        let (segment, rest) = self.place(hash);
        let segment = &self.segments[segment];
        let tag = self.tag(hash);
        let mut at = segment.home(rest);
        for _ in 0..segment.lines.len() {
            let line = &segment.lines[at];
            let mut hits = line.matches(tag, self.numbers);
            while hits > 0 {
                let number = line.words[hits.trailing_zeros() as usize] & self.numbers;
                if is_it(number) {
                    return Some(number);
                }
                hits &= hits - 1;
            }
            if line.passed == 0 {
                return None;
            }
            at = segment.after(at);
        }
        None
    }

    /// Enters a number that is not there; `rehash` answers the hashes of others.
    pub(super) fn insert(&mut self, hash: u64, number: u32, rehash: impl Fn(u32) -> u64) {
        let (segment, rest) = self.place(hash);
        if self.segments[segment].is_full() {
            // Few steps, and the last of them a large one: what a step leaves is lost to all
            // others, which are as far.
            let lines = match self.segments[segment].lines.len() {
                few if 8 * few < self.lines => (2 * few).max(1),
                some if some < self.lines => self.lines,
                many => many + many / 8 + 1,
            };
            self.resize(segment, lines, rehash);
        }
        let word = self.tag(hash) | number;
        self.segments[segment].put(rest, word);
    }

    fn resize(&mut self, segment: usize, lines: usize, rehash: impl Fn(u32) -> u64) {
        let old = std::mem::replace(&mut self.segments[segment], Segment::of(lines));
        let words = old.lines.iter().flat_map(|line| line.words);
        for word in words.filter(|word| *word > 0) {
            let (_, rest) = self.place(rehash(word & self.numbers));
            self.segments[segment].put(rest, word);
        }
    }

    /// Makes room for about so many, of an empty table.
    pub(super) fn make_room(&mut self, blocks: u64) {
        let each = blocks.div_ceil(self.segments.len() as u64) * FULL.1 / FULL.0;
        let lines = (each as usize).div_ceil(ROOM).clamp(1, self.lines);
        let segments = self.segments.iter_mut();
        segments.for_each(|segment| *segment = Segment::of(lines));
    }

    /// Takes a number out.
    pub(super) fn remove(&mut self, hash: u64, number: u32) {
        let (segment, rest) = self.place(hash);
        let word = self.tag(hash) | number;
        self.segments[segment].take(rest, word);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use kvdepot_testkit::seed::Rng;

    use super::*;

    /// As a key's would be.
    fn hash(number: u32) -> u64 {
        let mut x = u64::from(number) + 0x9e37_79b9_7f4a_7c15;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    #[test]
    fn behaves_like_a_map_while_it_fills_and_empties() {
        for (blocks, seed) in [(1, 1), (40, 2), (3000, 3), (70_000, 4)] {
            let mut rng = Rng::new(seed);
            let mut map = Map::new(blocks);
            if seed % 2 == 0 {
                map.make_room(blocks / 2);
            }
            let mut naive: HashMap<u32, ()> = HashMap::new();
            // More than it was made for, and then hardly any, several times.
            for step in 0..(blocks as u32 * 12).max(2000) {
                let number = rng.below(blocks * 3 / 2 + 1) as u32;
                let grows = (step / (blocks as u32 * 2).max(300)).is_multiple_of(2);
                let found = map.find(hash(number), |other| other == number);
                assert_eq!(found.is_some(), naive.contains_key(&number));
                match (found, grows || rng.once_in(8)) {
                    (None, true) => {
                        map.insert(hash(number), number, hash);
                        naive.insert(number, ());
                    }
                    (Some(_), false) => {
                        map.remove(hash(number), number);
                        naive.remove(&number);
                    }
                    _ => {}
                }
            }
            for number in 0..=(blocks * 3 / 2) as u32 {
                let found = map.find(hash(number), |other| other == number);
                assert_eq!(found.is_some(), naive.contains_key(&number));
                map.remove(hash(number), number);
            }
            let lines = map.segments.iter().flat_map(|segment| &segment.lines);
            for line in lines {
                assert_eq!((line.words, line.passed), ([0; ROOM], 0), "nothing is left");
            }
        }
    }

    #[test]
    fn what_does_not_fit_a_line_is_found_behind_it_and_the_search_ends() {
        let mut map = Map::new(100);
        // All of one line, the last, so that they are continued in the first.
        let alike = |number: u32| u64::MAX << 16 | u64::from(number << 9) & 0xFFFF;
        for number in 0..40 {
            map.insert(alike(number), number, alike);
        }
        for number in 0..40 {
            let found = map.find(alike(number), |other| other == number);
            assert_eq!(found, Some(number));
        }
        for number in (0..40).rev() {
            map.remove(alike(number), number);
            assert_eq!(map.find(alike(number), |other| other == number), None);
        }
        let passed = map.segments[0].lines.iter().map(|line| line.passed);
        assert_eq!(passed.sum::<u32>(), 0);
    }

    #[test]
    fn a_full_table_takes_five_bytes_a_block_and_a_search_reads_little_more_than_a_line() {
        let blocks = 300_000;
        let mut map = Map::new(blocks);
        (0..blocks as u32).for_each(|number| map.insert(hash(number), number, hash));
        let bytes = |segment: &Segment| size_of_val(&*segment.lines) + size_of::<Segment>();
        let bytes: usize = map.segments.iter().map(bytes).sum();
        let each = bytes as f64 / blocks as f64;
        assert!(each < 5.1, "{each} bytes a block");
        let lines = map.segments.iter().flat_map(|segment| &segment.lines);
        let passed: u32 = lines.map(|line| line.passed).sum();
        assert!(u64::from(passed) < blocks / 5, "{passed} lines too many");
        let mut others = 0;
        for number in 0..blocks as u32 {
            map.find(hash(number), |other| {
                others += u32::from(other != number);
                other == number
            });
        }
        assert!(u64::from(others) < blocks / 50, "{others} entries too many");
    }
}
