//! Calls that are under way, so that others can wait for those that began before.

use std::collections::BTreeSet;

#[derive(Default)]
pub(crate) struct UnderWay {
    next: u64,
    numbers: BTreeSet<u64>,
}

impl UnderWay {
    /// A call begins; by this number it [ends](UnderWay::end).
    pub(crate) fn begin(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        self.numbers.insert(number);
        number
    }

    pub(crate) fn end(&mut self, number: u64) {
        self.numbers.remove(&number);
    }

    pub(crate) fn count(&self) -> u64 {
        self.numbers.len() as u64
    }

    /// Above the numbers of all that have begun.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Whether one that began before that number has not ended.
    pub(crate) fn has_before(&self, number: u64) -> bool {
        self.numbers.first().is_some_and(|first| *first < number)
    }
}
