//! Which records of the table are free.

/// The numbers of records, low ones first, so that a table fills from its beginning.
pub(crate) struct Records {
    /// Numbers below `next` that are free.
    free: Vec<u32>,
    next: u32,
    limit: u32,
}

impl Records {
    /// Of so many, all are free.
    pub(crate) fn new(limit: u32) -> Records {
        Records {
            free: Vec::new(),
            next: 0,
            limit,
        }
    }

    /// Takes these, which rise, and frees the rest of the first `used`.
    pub(crate) fn restore(&mut self, taken: impl Iterator<Item = u32>, used: u32) {
        for number in taken {
            self.free.extend(self.next..number);
            self.next = number + 1;
        }
        self.free.extend(self.next..used.max(self.next));
        self.next = self.next.max(used);
        self.free.reverse();
    }

    /// `None` when the table is full.
    pub(crate) fn take(&mut self) -> Option<u32> {
        if let Some(number) = self.free.pop() {
            return Some(number);
        }
        (self.next < self.limit).then(|| {
            self.next += 1;
            self.next - 1
        })
    }

    pub(crate) fn give_back(&mut self, number: u32) {
        self.free.push(number);
    }

    /// How many can be taken.
    pub(crate) fn vacant(&self) -> u64 {
        u64::from(self.limit - self.next) + self.free.len() as u64
    }
}
