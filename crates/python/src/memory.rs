//! Ranges of memory: what a call moves, and what an owner has.

/// Memory that a call moves, whose owner is kept elsewhere.
#[derive(Clone, Copy)]
pub(crate) struct Raw {
    pub(crate) addr: usize,
    pub(crate) len: usize,
    pub(crate) writable: bool,
    /// The number of the CUDA device that it is on.
    pub(crate) device: Option<i32>,
}

/// Memory that somebody owns.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) begin: usize,
    pub(crate) end: usize,
    /// Whether it is the processor's, and not a device's.
    pub(crate) here: bool,
}

impl Place {
    /// Whether `len` bytes at `addr` are in it.
    pub(crate) fn holds(&self, addr: i128, len: usize) -> bool {
        let fits = |end| end <= self.end as i128;
        self.here && addr >= self.begin as i128 && fits(addr + len as i128)
    }
}
