//! A member's buffers, cut into chunks from the first on; and memory that chunks go through.

use kvdepot_media::Buffer;
use kvdepot_media::file::PAGE;

use super::format::CHUNK;
use crate::error::Error;

/// What is left of some buffers, one after the other.
pub(super) struct Rest<'a> {
    buffers: &'a [Buffer],
    /// Bytes of the first that were taken.
    taken: usize,
}

impl<'a> Rest<'a> {
    pub(super) fn of(buffers: &'a [Buffer]) -> Rest<'a> {
        Rest { buffers, taken: 0 }
    }

    /// The next so many bytes, or as many as there are.
    pub(super) fn take(&mut self, mut bytes: usize) -> Result<Vec<Buffer>, Error> {
        let mut some = Vec::new();
        while bytes > 0
            && let Some((first, behind)) = self.buffers.split_first()
        {
            let len = bytes.min(first.len() - self.taken);
            if len > 0 {
                some.push(first.slice(self.taken, len)?);
            }
            self.taken += len;
            bytes -= len;
            if self.taken == first.len() {
                (self.buffers, self.taken) = (behind, 0);
            }
        }
        Ok(some)
    }
}

/// Memory for a chunk, as direct I/O takes it.
#[derive(Debug)]
pub(super) struct Slot {
    bytes: Vec<u8>,
    begin: usize,
    /// Bytes of it that are used.
    pub(super) used: usize,
}

impl Slot {
    pub(super) fn new() -> Slot {
        Slot::over(vec![0; CHUNK as usize + PAGE])
    }

    fn over(bytes: Vec<u8>) -> Slot {
        let begin = bytes.as_ptr().align_offset(PAGE);
        Slot {
            bytes,
            begin,
            used: 0,
        }
    }

    /// What is not used of it.
    pub(super) fn room(&mut self) -> &mut [u8] {
        &mut self.bytes[self.begin + self.used..self.begin + CHUNK as usize]
    }

    /// What is used of it.
    pub(super) fn filled(&self) -> &[u8] {
        &self.bytes[self.begin..self.begin + self.used]
    }

    pub(super) fn is_full(&self) -> bool {
        self.used == CHUNK as usize
    }

    /// All of it to be moved: the memory, and the part of it that is used.
    pub(super) fn lend(self) -> Result<(Buffer, Buffer), Error> {
        let whole = Buffer::from_vec(self.bytes);
        let used = whole.slice(self.begin, self.used)?;
        Ok((whole, used))
    }

    /// It again, once nothing moves any more; a new one should somebody still hold it.
    pub(super) fn back(whole: Buffer) -> Slot {
        whole.into_vec().map_or_else(|_| Slot::new(), Slot::over)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_cut_where_chunks_end() {
        let whole = Buffer::from_vec((0..100).collect());
        let at = |offset, len| whole.slice(offset, len).unwrap();
        let buffers = [at(0, 10), at(10, 0), at(10, 50), at(60, 40)];
        let mut rest = Rest::of(&buffers);
        let mut all = Vec::new();
        for (bytes, count) in [(5, 1), (15, 2), (60, 2), (30, 1), (1, 0)] {
            let some = rest.take(bytes).unwrap();
            assert_eq!(some.len(), count, "{bytes} bytes");
            all.extend(some.iter().flat_map(Buffer::to_vec));
        }
        assert_eq!(all, (0..100).collect::<Vec<u8>>());
    }

    #[test]
    fn a_slot_comes_back_at_a_page() {
        let mut slot = Slot::new();
        slot.room()[..3].copy_from_slice(&[1, 2, 3]);
        slot.used = 3;
        let (whole, used) = slot.lend().unwrap();
        assert_eq!((used.addr() % PAGE, used.to_vec()), (0, vec![1, 2, 3]));
        drop(used);
        let mut slot = Slot::back(whole);
        assert_eq!((slot.used, slot.room().len()), (0, CHUNK as usize));
    }
}
