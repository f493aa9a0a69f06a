//! Memory with a stable address and an owner that keeps it alive, or bytes that a carrier reaches.

use crate::carrier::Carrier;
use crate::cuda::{Device, Fence, Memory};
use crate::end::End;
use crate::error::{Error, Result};
use crate::once;
use std::any::Any;
use std::sync::Arc;

/// A range of bytes that a batch may move, kept alive by its owner.
///
/// The bytes are never exposed as a slice, because other processes may share and change them at any
/// time. They are only copied in and out. If two copies write the same range at the same time, its
/// content is unspecified. A copy that reads a range while another one writes it gets unspecified
/// bytes; the checksum detects that.
#[derive(Clone)]
pub struct Buffer {
    addr: usize,
    len: usize,
    writable: bool,
    owner: Owner,
    end: End,
    /// Whether zeros may be written behind it, up to its carrier's alignment.
    padded: bool,
}

/// A reference that keeps memory alive.
pub type Owner = Arc<dyn Any + Send + Sync>;

impl Buffer {
    /// Creates a buffer over `len` bytes at address `addr`.
    ///
    /// # Safety
    ///
    /// * As long as `owner` or a clone of it lives, the range is mapped and readable. If `writable`
    ///   is set, it is also writable.
    /// * While a batch that uses the buffer is in flight, this process has no Rust reference to the
    ///   bytes of a writable buffer, and no mutable one to those of a read-only buffer.
    #[must_use]
    pub unsafe fn from_raw(addr: usize, len: usize, writable: bool, owner: Owner) -> Self {
        Self {
            addr,
            len,
            writable,
            owner,
            end: End::Memory,
            padded: false,
        }
    }

    /// Creates a writable buffer over `len` bytes at address `addr` of a GPU's memory. Only batches
    /// can move its bytes.
    ///
    /// # Safety
    ///
    /// As long as `owner` or a clone of it lives, the range is memory of `device`, and no other
    /// code writes it.
    #[must_use]
    pub unsafe fn on_device(addr: usize, len: usize, owner: Owner, device: Arc<Device>) -> Self {
        Self {
            addr,
            len,
            writable: true,
            owner,
            end: End::Device(device, None),
            padded: false,
        }
    }

    /// Creates a buffer over all of `memory`, which was allocated on a GPU.
    #[must_use]
    pub fn of_device(memory: &Arc<Memory>) -> Self {
        let (at, len, device) = (memory.at(), memory.len(), Arc::clone(memory.device()));
        // SAFETY: it is the device's until its owner is dropped, and only batches know of it.
        unsafe { Self::on_device(at, len, Arc::clone(memory) as Owner, device) }
    }

    /// Returns this buffer with the condition that copies wait for `fence`. It has an effect only
    /// on memory of a GPU.
    #[must_use]
    pub fn behind(mut self, fence: &Arc<Fence>) -> Self {
        if let End::Device(_, behind) = &mut self.end {
            *behind = Some(Arc::clone(fence));
        }
        self
    }

    /// Creates a buffer over `len` bytes at position `at` of the medium that `carrier` reads and
    /// writes.
    ///
    /// Only batches can move these bytes. The call does not check that they exist; a part that
    /// reads missing bytes fails.
    #[must_use]
    pub fn carried(carrier: Arc<dyn Carrier>, at: usize, len: usize, writable: bool) -> Self {
        Self {
            addr: at,
            len,
            writable,
            owner: Arc::clone(&carrier) as Owner,
            end: End::Carried(carrier),
            padded: false,
        }
    }

    /// Returns this buffer with permission to write zeros after it, up to the backend's alignment.
    ///
    /// Other data in that padding is lost. Such a buffer must be the last one of its part.
    #[must_use]
    pub fn padded(mut self) -> Self {
        self.pad();
        self
    }

    /// Gives permission to write zeros after this buffer; see [`Buffer::padded`].
    pub fn pad(&mut self) {
        self.padded = true;
    }

    /// Creates a writable buffer that owns `bytes`. [`Buffer::to_vec`] returns a copy of its
    /// content.
    #[must_use]
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        let memory = Heap::new(bytes);
        let (addr, len) = (memory.at.addr(), memory.len);
        Self {
            addr,
            len,
            writable: true,
            owner: Arc::new(memory),
            end: End::Memory,
            padded: false,
        }
    }

    /// Returns all bytes that were passed to [`Buffer::from_vec`], also for a slice of that buffer.
    ///
    /// # Errors
    ///
    /// The buffer itself if another reference to the bytes exists, or if it was not created by
    /// [`Buffer::from_vec`].
    pub fn into_vec(self) -> std::result::Result<Vec<u8>, Self> {
        // Where this is the only owner, nothing moves them any more.
        if !self.owner.is::<Heap>() || Arc::strong_count(&self.owner) > 1 {
            return Err(self);
        }
        let heap = self.owner.downcast::<Heap>().map(Arc::into_inner);
        Ok(heap.ok().flatten().map(Heap::into_vec).unwrap_or_default())
    }

    /// Returns a buffer over `len` bytes at `offset` of this buffer.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`] if the range exceeds this buffer.
    pub fn slice(&self, offset: usize, len: usize) -> Result<Self> {
        check_range(offset as u64, len as u64, self.len as u64)?;
        Ok(Self {
            addr: self.addr + offset,
            len,
            padded: self.padded && offset + len == self.len,
            ..self.clone()
        })
    }

    /// Returns this buffer without permission to write it.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.writable = false;
        self
    }

    /// Returns the address of the first byte, or its position in the medium of an I/O backend.
    #[must_use]
    pub fn addr(&self) -> usize {
        self.addr
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the length is zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns true if a batch may write to this buffer.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Returns true if the buffer is memory of this process, and false for a GPU and for an I/O
    /// backend.
    #[must_use]
    pub fn is_memory(&self) -> bool {
        matches!(self.end, End::Memory)
    }

    /// Returns the GPU that has this memory, or `None` for other buffers.
    #[must_use]
    pub fn device(&self) -> Option<&Arc<Device>> {
        match &self.end {
            End::Device(device, _) => Some(device),
            _ => None,
        }
    }

    pub(crate) fn end(&self) -> &End {
        &self.end
    }

    /// The same bytes, reached by another carrier.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn by(mut self, carrier: Arc<dyn Carrier>) -> Self {
        self.end = End::Carried(carrier);
        self
    }

    pub(crate) fn is_padded(&self) -> bool {
        self.padded
    }

    /// Refuses memory that this process cannot touch.
    pub(crate) fn check_host(&self) -> Result<()> {
        match self.is_memory() {
            true => Ok(()),
            false => Err(Error::Elsewhere { addr: self.addr }),
        }
    }

    /// Returns the reference that keeps the memory alive.
    #[must_use]
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Returns a copy of the bytes, or zeros if the buffer is not memory of this process.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        if self.check_host().is_err() {
            return vec![0; self.len];
        }
        let mut out = vec![0; self.len];
        // SAFETY: the owner keeps `len` bytes at `addr` readable; `out` is new and as long. A lane
        // may write there meanwhile, which `once` is for.
        unsafe { once::copy(self.as_ptr(), out.as_mut_ptr(), self.len) };
        out
    }

    /// Copies `bytes` to `offset` in this buffer.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`] if the range exceeds the buffer. [`Error::ReadOnly`] if the buffer is
    /// not writable. [`Error::Elsewhere`] if it is not memory of this process.
    pub fn write_at(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        check_range(offset as u64, bytes.len() as u64, self.len as u64)?;
        self.check_host()?;
        if !self.writable {
            return Err(Error::ReadOnly { addr: self.addr });
        }
        // SAFETY: the range was just checked, and the owner keeps it writable. `bytes` is a Rust
        // reference, which by the contract of `from_raw` does not point into this buffer. What a
        // lane writes there at once is a mixture, of which nothing is concluded here; what it reads
        // passes through `once`.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                self.as_mut_ptr().add(offset),
                bytes.len(),
            );
        }
        Ok(())
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        std::ptr::with_exposed_provenance(self.addr)
    }

    pub(crate) fn as_mut_ptr(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.addr)
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer")
            .field("addr", &format_args!("{:#x}", self.addr))
            .field("len", &self.len)
            .field("writable", &self.writable)
            .finish_non_exhaustive()
    }
}

/// Returns the positions of two buffers that share a byte, if there are any. Empty buffers share
/// nothing.
///
/// The call takes linear time if the buffers are sorted by address, in either order.
#[must_use]
pub fn first_overlap(buffers: &[Buffer]) -> Option<(usize, usize)> {
    let end = |b: &Buffer| b.addr + b.len;
    let full = || buffers.iter().filter(|b| !b.is_empty());
    let mut next = full();
    next.next();
    if full().zip(next.clone()).all(|(a, b)| end(a) <= b.addr)
        || full().zip(next).all(|(a, b)| end(b) <= a.addr)
    {
        return None;
    }
    let mut order: Vec<usize> = (0..buffers.len())
        .filter(|&i| !buffers[i].is_empty())
        .collect();
    order.sort_by_key(|&i| buffers[i].addr);
    order
        .windows(2)
        .find(|pair| end(&buffers[pair[0]]) > buffers[pair[1]].addr)
        .map(|pair| (pair[0].min(pair[1]), pair[0].max(pair[1])))
}

/// Whether `len` bytes at `offset` lie inside `end` bytes.
pub(crate) fn check_range(offset: u64, len: u64, end: u64) -> Result<()> {
    match offset.checked_add(len) {
        Some(last) if last <= end => Ok(()),
        _ => Err(Error::OutOfBounds { offset, len, end }),
    }
}

/// Bytes on the heap that only raw copies touch.
struct Heap {
    at: *mut u8,
    len: usize,
    capacity: usize,
}

impl Heap {
    fn new(bytes: Vec<u8>) -> Self {
        let mut bytes = std::mem::ManuallyDrop::new(bytes);
        let at = bytes.as_mut_ptr();
        at.expose_provenance();
        Self {
            at,
            len: bytes.len(),
            capacity: bytes.capacity(),
        }
    }
}

impl Heap {
    fn into_vec(self) -> Vec<u8> {
        let heap = std::mem::ManuallyDrop::new(self);
        // SAFETY: as in `drop`, which is not called.
        unsafe { Vec::from_raw_parts(heap.at, heap.len, heap.capacity) }
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: the three came from a vector that was not dropped, and this is the last owner.
        drop(unsafe { Vec::from_raw_parts(self.at, self.len, self.capacity) });
    }
}

// SAFETY: the pointer is the only one to memory that this value owns; the bytes behind it are
// touched by raw copies alone, never through a shared `Heap`.
unsafe impl Send for Heap {}
// SAFETY: as above.
unsafe impl Sync for Heap {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_stay_inside_and_keep_the_owner() {
        let buffer = Buffer::from_vec((0..100).collect());
        let part = buffer.slice(90, 10).unwrap();
        drop(buffer);
        assert_eq!(part.to_vec(), (90..100).collect::<Vec<u8>>());
        assert!(part.slice(10, 0).unwrap().is_empty());
        assert!(matches!(
            part.slice(5, 6),
            Err(Error::OutOfBounds {
                offset: 5,
                len: 6,
                end: 10
            })
        ));
        assert!(part.slice(usize::MAX, 2).is_err());
    }

    #[test]
    fn who_owns_bytes_alone_gets_them_back() {
        let buffer = Buffer::from_vec(vec![1, 2, 3]);
        let part = buffer.slice(1, 1).unwrap();
        let buffer = buffer.into_vec().unwrap_err();
        drop(buffer);
        part.write_at(0, &[9]).unwrap();
        assert_eq!(part.into_vec().unwrap(), [1, 9, 3]);
        let owner: Owner = Arc::new([4_u8; 2]);
        // SAFETY: nobody reads it.
        let other = unsafe { Buffer::from_raw(0x1000, 2, false, owner) };
        assert!(other.into_vec().is_err());
    }

    #[test]
    fn read_only_buffers_are_not_written() {
        let buffer = Buffer::from_vec(vec![1; 4]);
        buffer.write_at(1, &[7, 8]).unwrap();
        assert!(buffer.write_at(3, &[7, 8]).is_err());
        let fixed = buffer.read_only();
        assert!(matches!(
            fixed.write_at(0, &[9]),
            Err(Error::ReadOnly { .. })
        ));
        assert_eq!(fixed.to_vec(), [1, 7, 8, 1]);
    }

    #[test]
    fn overlaps_are_found_in_any_order() {
        let whole = Buffer::from_vec(vec![0; 100]);
        let at = |offset, len| whole.slice(offset, len).unwrap();
        assert_eq!(first_overlap(&[]), None);
        assert_eq!(
            first_overlap(&[at(0, 10), at(10, 10), at(15, 0), at(20, 5)]),
            None
        );
        assert_eq!(first_overlap(&[at(20, 5), at(10, 10), at(0, 10)]), None);
        assert_eq!(first_overlap(&[at(50, 10), at(0, 10), at(20, 10)]), None);
        assert_eq!(
            first_overlap(&[at(50, 10), at(0, 10), at(59, 1)]),
            Some((0, 2))
        );
        assert_eq!(first_overlap(&[at(0, 10), at(9, 10)]), Some((0, 1)));
    }
}
