//! Memory of a neighbour, as this process reaches it, until the neighbour wants it back.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvdepot_host::Condvar;
use kvdepot_media::{Access, Mapping, copy, fence};
use libc::iovec;
use parking_lot::Mutex;
use zerocopy::FromBytes;

use super::words::{Lead, Place, Reach};
use crate::error::Fault;
use crate::flight::{Flight, Op};
use crate::grant::Rights;
use crate::wire::Malformed;

/// One range of the grant.
struct Range {
    /// Where it begins in the grant.
    start: u64,
    len: u64,
    /// Where it is: in this process, or in the neighbour's.
    at: usize,
}

/// What was mapped.
pub(crate) struct Mapped {
    ranges: Vec<Range>,
    len: u64,
    /// The neighbour's process, where its memory is not mapped here.
    process: Option<i32>,
    rights: Rights,
    users: Mutex<Users>,
    unused: Condvar,
    /// What the ranges lie in, until it is given back.
    mappings: Mutex<Vec<Arc<Mapping>>>,
}

/// Slices that are being copied, and whether no more may begin.
#[derive(Default)]
struct Users {
    count: usize,
    is_over: bool,
}

/// A slice of it that is being copied.
struct Use<'a>(&'a Mapped);

impl Drop for Use<'_> {
    fn drop(&mut self) {
        let mut users = self.0.users.lock();
        users.count -= 1;
        if users.is_over && users.count == 0 {
            self.0.unused.notify_all();
        }
    }
}

impl Mapped {
    /// From what the neighbour said, and the descriptors that came with it.
    pub(super) fn new(body: &[u8], descriptors: Vec<OwnedFd>, process: i32) -> io::Result<Mapped> {
        let (lead, places) =
            Lead::read_from_prefix(body).map_err(|_| broken("truncated header"))?;
        let places = <[Place]>::ref_from_bytes(places).map_err(|_| broken("truncated places"))?;
        let reach = Reach::of(lead.reach.get()).ok_or_else(|| broken("unknown reach"))?;
        let rights = Rights::of(lead.rights.get());
        let mut mapped = Mapped {
            ranges: Vec::with_capacity(places.len()),
            len: lead.len.get(),
            process: (reach == Reach::Process).then_some(process),
            rights,
            users: Mutex::default(),
            unused: Condvar::new(),
            mappings: Mutex::default(),
        };
        let mappings = match reach {
            Reach::Process => Vec::new(),
            Reach::Mapping => map_all(descriptors, places, rights)?,
        };
        let mut start = 0_u64;
        for place in places {
            let len = place.len.get();
            let at = match reach {
                Reach::Process => usize::try_from(place.at.get()).map_err(io::Error::other)?,
                Reach::Mapping => {
                    let mapping = mappings.get(place.descriptor.get() as usize);
                    let mapping = mapping.ok_or_else(|| broken("missing descriptor"))?;
                    let buffer = mapping
                        .buffer(place.at.get(), len)
                        .map_err(io::Error::other)?;
                    buffer.addr()
                }
            };
            mapped.ranges.push(Range { start, len, at });
            start = start
                .checked_add(len)
                .ok_or_else(|| broken("ranges exceed the address space"))?;
        }
        if start != lead.len.get() || places.is_empty() {
            return Err(broken("ranges do not match the length"));
        }
        *mapped.mappings.get_mut() = mappings;
        if reach == Reach::Process {
            mapped.probe()?;
        }
        Ok(mapped)
    }

    /// Whether the system allows it: by default not to everybody.
    fn probe(&self) -> io::Result<()> {
        let mut byte = [0_u8];
        let here = iovec {
            iov_base: byte.as_mut_ptr().cast(),
            iov_len: 1,
        };
        let there = remote(self.ranges[0].at, 1);
        match self.call(Op::Read, &[here], &[there])? {
            1 => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn begin(&self) -> Option<Use<'_>> {
        let mut users = self.users.lock();
        if users.is_over {
            return None;
        }
        users.count += 1;
        drop(users);
        Some(Use(self))
    }

    /// Whether it has this length and these rights: plans are checked against those.
    pub(crate) fn is_like(&self, len: u64, rights: Rights) -> bool {
        self.len == len && self.rights == rights
    }

    /// Whether it may be used.
    pub(crate) fn is_there(&self) -> bool {
        !self.users.lock().is_over
    }

    /// Nobody uses it any more when this returns, and it is not mapped.
    pub(super) fn end(&self) {
        let mut users = self.users.lock();
        users.is_over = true;
        while users.count > 0 {
            self.unused.wait(&mut users);
        }
        drop(users);
        self.mappings.lock().clear();
    }

    /// Copies a slice; it is given back where that cannot be done this way any more.
    pub(crate) fn carry(&self, flight: Flight) -> Result<(), Flight> {
        let Some(using) = self.begin() else {
            return Err(flight);
        };
        if let Some(cause) = flight.cause() {
            flight.end(Err(cause));
            return Ok(());
        }
        let result = match self.process {
            None => {
                self.copy(&flight);
                Ok(())
            }
            Some(_) => self.exchange(&flight),
        };
        drop(using);
        flight.end(result);
        Ok(())
    }

    /// Where a range of the grant lies, piece by piece.
    fn pieces(&self, offset: u64, len: u64, mut each: impl FnMut(usize, usize)) {
        let (mut offset, mut left) = (offset, len);
        let mut number = self.ranges.partition_point(|range| range.start <= offset) - 1;
        while left > 0 {
            // A range beyond the last one is none of the grant: plans have been checked.
            let Some(range) = self.ranges.get(number) else {
                return;
            };
            let inside = offset - range.start;
            let take = left.min(range.len - inside);
            each(range.at + inside as usize, take as usize);
            (offset, left, number) = (offset + take, left - take, number + 1);
        }
    }

    fn copy(&self, flight: &Flight) {
        debug_assert!(
            flight.op == Op::Read || self.rights.write,
            "plans check rights"
        );
        for piece in &flight.pieces {
            let mut local = piece.local as usize;
            self.pieces(piece.offset, u64::from(piece.len), |there, len| {
                let (from, to) = match flight.op {
                    Op::Read => (there, local),
                    Op::Write => (local, there),
                };
                let from = std::ptr::with_exposed_provenance(from);
                let to = std::ptr::with_exposed_provenance_mut(to);
                // SAFETY: local memory is in a region that the flight's batch holds; what is there
                // lies in a mapping that a `Use` keeps. Two processes' memory, or two mappings, do
                // not overlap but where a process writes to memory that it has published itself,
                // whose bytes are then unspecified, as the page says.
                unsafe { copy(from, to, len) };
                local += len;
            });
        }
        fence();
    }

    /// By calls of the kernel, which reach into the neighbour's process.
    fn exchange(&self, flight: &Flight) -> Result<(), Fault> {
        let (mut here, mut there) = (Vec::new(), Vec::new());
        for piece in &flight.pieces {
            here.push(remote(piece.local as usize, piece.len as usize));
            self.pieces(piece.offset, u64::from(piece.len), |at, len| {
                there.push(remote(at, len))
            });
        }
        let (mut here, mut there) = (&mut here[..], &mut there[..]);
        while !here.is_empty() {
            let done = self.call(flight.op, here, there).map_err(|_| Fault::Lost)?;
            if done == 0 {
                return Err(Fault::Lost);
            }
            here = advance(here, done);
            there = advance(there, done);
        }
        Ok(())
    }

    fn call(&self, op: Op, here: &[iovec], there: &[iovec]) -> io::Result<usize> {
        let process = self.process.unwrap_or(-1);
        let count = |ranges: &[iovec]| ranges.len().min(1024) as libc::c_ulong;
        let (ours, theirs) = (here.as_ptr(), there.as_ptr());
        // SAFETY: `here` are ranges of a region that the flight's batch holds, or of the caller's;
        // `there` are addresses of another process, which the kernel checks.
        let done = unsafe {
            match op {
                Op::Read => {
                    libc::process_vm_readv(process, ours, count(here), theirs, count(there), 0)
                }
                Op::Write => {
                    libc::process_vm_writev(process, ours, count(here), theirs, count(there), 0)
                }
            }
        };
        usize::try_from(done).map_err(|_| io::Error::last_os_error())
    }
}

impl std::fmt::Debug for Mapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapped")
            .field("process", &self.process)
            .finish_non_exhaustive()
    }
}

fn map_all(
    descriptors: Vec<OwnedFd>,
    places: &[Place],
    rights: Rights,
) -> io::Result<Vec<Arc<Mapping>>> {
    let access = match rights.write {
        true => Access::ReadWrite,
        false => Access::ReadOnly,
    };
    let mut mappings = Vec::with_capacity(descriptors.len());
    for (number, descriptor) in descriptors.into_iter().enumerate() {
        let is_its = |place: &&Place| place.descriptor.get() as usize == number;
        let medium = places.iter().find(is_its).map(|place| place.medium.get());
        let medium = medium.ok_or_else(|| broken("missing descriptor"))?;
        let mapping = Mapping::from_fd(descriptor, medium, access);
        mappings.push(mapping.map_err(io::Error::other)?);
    }
    Ok(mappings)
}

fn remote(at: usize, len: usize) -> iovec {
    iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(at),
        iov_len: len,
    }
}

/// The ranges without their first bytes.
fn advance(mut ranges: &mut [iovec], mut bytes: usize) -> &mut [iovec] {
    while bytes > 0 {
        let Some(first) = ranges.first_mut() else {
            break;
        };
        if first.iov_len > bytes {
            first.iov_base = first.iov_base.wrapping_byte_add(bytes);
            first.iov_len -= bytes;
            break;
        }
        bytes -= first.iov_len;
        ranges = &mut ranges[1..];
    }
    ranges
}

fn broken(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, Malformed(what))
}
