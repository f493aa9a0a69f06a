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

/// Who reaches memory by its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Home {
    Processor,
    Device(i32),
}

impl Home {
    /// The number of the device.
    pub(crate) fn device(self) -> Option<i32> {
        match self {
            Home::Processor => None,
            Home::Device(device) => Some(device),
        }
    }
}

/// Memory that somebody owns.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) begin: usize,
    pub(crate) end: usize,
    /// Who reaches it; `None` where neither does.
    pub(crate) home: Option<Home>,
}

impl Place {
    /// Whether `len` bytes at `addr` of that memory are in it.
    pub(crate) fn holds(&self, home: Home, addr: i128, len: usize) -> bool {
        let fits = |end| end <= self.end as i128;
        let inside = addr >= self.begin as i128 && fits(addr + len as i128);
        self.home == Some(home) && inside
    }
}
