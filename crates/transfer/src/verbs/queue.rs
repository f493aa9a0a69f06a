//! Queue pairs: connected, posted to, polled and shut.

use super::abi::{self, QpAttr, SendWr, Wc};
use super::device::Device;
use super::endpoint::{Endpoint, Numbers};
use super::error::{Error, Failure, Result};
use super::port::Port;
use super::region::{Piece, Region};
use super::request::{Chain, Completion, Op};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::ffi::c_int;
use std::hash::{BuildHasher, RandomState};
use std::mem::ManuallyDrop;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

mod made;
use made::Made;

/// READs that a queue pair serves at once, at most: enough for a network's round trip at its full
/// speed with slices of a megabyte, and what most devices have.
const READS_MAX: u8 = 16;

/// 4.096 µs × 2^14 = 67 ms until a packet that was not answered is sent again, seven times: half a
/// second or, as devices may take up to four times as long, two until a peer is given up. Shorter
/// ones are taken for losses where a switch is busy. The caller's deadline ends it before that, or
/// where a device never does.
const TIMEOUT: u8 = 14;
const RETRIES: u8 = 7;
/// As often as it takes, while a peer's device says that it is not ready: it does so only while it
/// fetches memory, and the caller has a deadline.
const RETRIES_NOT_READY: u8 = 7;
/// 0.64 ms until it is asked again.
const NOT_READY_TIMER: u8 = 12;
/// As far as a packet may be routed: the usual number.
const HOP_LIMIT: u8 = 64;

/// Completions that are fetched at once.
const POLLED: usize = 32;

/// How a queue pair is made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Work requests that may be outstanding.
    pub(crate) depth: u16,
    /// Most pieces of a slice.
    pub(crate) pieces: u8,
    /// So many work requests that succeed are told by one completion, or fewer at a chain's end.
    /// At most half of `depth`, so that there is room again before all have completed.
    pub(crate) signal_every: u16,
}

impl Default for Shape {
    /// What every device has: two batches of 64, and pieces for K and V of two layers.
    fn default() -> Self {
        Self {
            depth: 128,
            pieces: 4,
            signal_every: 32,
        }
    }
}

impl Shape {
    fn check(&self, device: &Device) -> Result<()> {
        let (depth, pieces) = (device.limits().depth_max, device.limits().pieces_max);
        for (field, value, least, most) in [
            ("depth", self.depth.into(), 2, depth),
            ("pieces", self.pieces.into(), 1, pieces),
            (
                "signal_every",
                self.signal_every.into(),
                1,
                u32::from(self.depth) / 2,
            ),
        ] {
            if !(least..=most).contains(&value) {
                return Err(Error::invalid(
                    field,
                    value.into(),
                    format!("{least} to {most}"),
                ));
            }
        }
        Ok(())
    }
}

/// A reliable connection to one queue pair of a peer.
#[derive(Debug)]
pub(crate) struct QueuePair {
    made: Made,
    port: Port,
    shape: Shape,
    psn: u32,
    state: State,
    /// Posted and not completed, the oldest first; `held` has the regions of all their pieces.
    outstanding: VecDeque<Outstanding>,
    held: VecDeque<Arc<Region>>,
    /// The number of the oldest outstanding one, or of the next: what its completion says.
    oldest: u64,
    /// Posted since the last one whose success is told.
    unsignalled: u16,
    wrs: Vec<SendWr>,
    posts: u64,
    work_requests: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    New,
    Connected,
    /// A work request has failed: the device carries nothing any more.
    Broken,
    /// Destroyed.
    Shut,
}

#[derive(Debug)]
struct Outstanding {
    id: u64,
    pieces: usize,
}

// SAFETY: the pointers in `wrs` are those of one call; what the library made may be used by any
// thread, and is by one at a time, as all that does so needs `&mut`.
unsafe impl Send for QueuePair {}

impl QueuePair {
    /// Makes one that is not connected.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a shape that the device does not have, [`Error::Os`],
    /// [`Error::Forked`].
    pub(crate) fn make(device: &Arc<Device>, port: Port, shape: Shape) -> Result<Self> {
        device.check_here()?;
        shape.check(device)?;
        let mut made = Made::new(device, &shape)?;
        made.modify(
            &mut QpAttr {
                qp_state: abi::STATE_INIT,
                port_num: port.number,
                qp_access_flags: abi::ACCESS_REMOTE_READ | abi::ACCESS_REMOTE_WRITE,
                ..QpAttr::default()
            },
            abi::ATTRS_INIT,
        )?;
        // Packets that are still under way to an earlier queue pair of the number are not taken
        // for this one's.
        let random = RandomState::new().hash_one(made.qpn());
        let psn = u32::try_from(random & 0xFF_FFFF).unwrap_or(0);
        Ok(Self {
            made,
            port,
            shape,
            psn,
            state: State::New,
            outstanding: VecDeque::with_capacity(shape.depth.into()),
            held: VecDeque::new(),
            oldest: 0,
            unsignalled: 0,
            wrs: Vec::with_capacity(shape.depth.into()),
            posts: 0,
            work_requests: 0,
        })
    }

    /// What the peer has to know of this end.
    pub(crate) fn local(&self) -> Endpoint {
        Endpoint::new(&Numbers {
            mtu: self.port.mtu,
            is_ethernet: self.port.is_ethernet,
            qpn: self.made.qpn(),
            psn: self.psn,
            lid: self.port.lid,
            reads: self.made.device().limits().serves_max.min(READS_MAX),
            gid: self.port.gid,
        })
    }

    /// Connects it to the peer's, whose [`QueuePair::local`] this is. The peer connects to this
    /// one; what is posted before it has is sent again until then.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an end on another kind of network, [`Error::Shut`] where it was
    /// connected before; [`Error::Os`], also where the network knows no way to the peer.
    pub(crate) fn connect(&mut self, remote: &Endpoint) -> Result<()> {
        if self.state != State::New {
            return Err(Error::Shut);
        }
        let (here, there) = (&self.port, remote.numbers());
        if here.is_ethernet != there.is_ethernet {
            let allowed = "the same type of network as this host";
            return Err(Error::invalid(
                "peer's link",
                there.is_ethernet.into(),
                allowed,
            ));
        }
        let limits = self.made.device().limits();
        let (serves, reads) = (limits.serves_max.min(READS_MAX), limits.reads_max);
        let mut attributes = QpAttr {
            qp_state: abi::STATE_RTR,
            path_mtu: here.mtu.min(there.mtu).into(),
            dest_qp_num: there.qpn,
            rq_psn: there.psn,
            max_dest_rd_atomic: serves,
            min_rnr_timer: NOT_READY_TIMER,
            ..QpAttr::default()
        };
        attributes.ah_attr.port_num = here.number;
        attributes.ah_attr.dlid = there.lid;
        // Within an InfiniBand subnet a LID is all that is needed.
        if here.is_ethernet || there.lid == 0 {
            attributes.ah_attr.is_global = 1;
            attributes.ah_attr.grh.dgid = abi::Gid(there.gid);
            attributes.ah_attr.grh.sgid_index = here.gid_index;
            attributes.ah_attr.grh.hop_limit = HOP_LIMIT;
        }
        self.made.modify(&mut attributes, abi::ATTRS_RTR)?;
        let mut attributes = QpAttr {
            qp_state: abi::STATE_RTS,
            sq_psn: self.psn,
            timeout: TIMEOUT,
            retry_cnt: RETRIES,
            rnr_retry: RETRIES_NOT_READY,
            max_rd_atomic: reads.min(there.reads),
            ..QpAttr::default()
        };
        self.made.modify(&mut attributes, abi::ATTRS_RTS)?;
        self.state = State::Connected;
        Ok(())
    }

    /// How it was made.
    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// How often the device was told of new work requests, and of how many.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.posts, self.work_requests)
    }

    /// Work requests that are posted and have not completed.
    pub(crate) fn outstanding(&self) -> usize {
        self.outstanding.len()
    }

    /// Work requests for which there is room.
    pub(crate) fn room(&self) -> usize {
        usize::from(self.shape.depth) - self.outstanding.len()
    }

    /// Whether it takes work requests.
    pub(crate) fn is_open(&self) -> bool {
        self.state == State::Connected
    }

    /// Refuses a slice that the device could only fail.
    pub(super) fn check(&self, op: Op, pieces: &[Piece]) -> Result<()> {
        let device = self.made.device();
        let (count, most) = (pieces.len(), usize::from(self.shape.pieces));
        if !(1..=most).contains(&count) {
            let allowed = format!("1 to {most}");
            return Err(Error::invalid("pieces of a slice", count as u64, allowed));
        }
        let bytes = pieces.iter().map(|piece| u64::from(piece.len())).sum();
        let most = self.port.message_max;
        if bytes > u64::from(most) {
            return Err(Error::invalid(
                "bytes of a slice",
                bytes,
                format!("at most {most}"),
            ));
        }
        for region in pieces.iter().map(|piece| &piece.region) {
            if !Arc::ptr_eq(region.device(), device) {
                return Err(Error::OtherDevice {
                    region: region.device().name().to_owned(),
                    device: device.name().to_owned(),
                });
            }
            if op == Op::Read && !region.buffer().is_writable() {
                return Err(Error::ReadOnly {
                    addr: region.buffer().addr(),
                });
            }
        }
        Ok(())
    }

    /// Posts the first `count` works of a chain at once, and takes them from it. On an error the
    /// ones that the device took are gone from it, too, and this is broken.
    ///
    /// # Errors
    ///
    /// [`Error::Full`] beyond the room, [`Error::Shut`], [`Error::Forked`], [`Error::Os`].
    pub(super) fn post(&mut self, chain: &mut Chain, count: usize) -> Result<()> {
        self.made.device().check_here()?;
        if !self.is_open() {
            return Err(Error::Shut);
        }
        let count = count.min(chain.len());
        if count > self.room() {
            return Err(Error::Full {
                waiting: count,
                room: self.room(),
            });
        }
        if count == 0 {
            return Ok(());
        }
        self.write_down(chain, count);
        // SAFETY: `wrs` has the requests of the chain's first works, linked in order, each with
        // sges of the chain, which both live as long as the call. Each sge lies in a region (see
        // `Region::piece`), and the chain has it; it goes to `held` below, whatever the answer.
        let (answer, taken) = unsafe { self.made.post(&mut self.wrs) };
        self.posts += 1;
        self.work_requests += taken as u64;
        let (works, regions) = chain.take(taken);
        self.held.extend(regions);
        let works = works.map(|work| Outstanding {
            id: work.id,
            pieces: work.pieces,
        });
        self.outstanding.extend(works);
        if answer != 0 {
            // Of the ones it took, those behind the last signalled one might never be told of.
            self.state = State::Broken;
            let device = self.made.device().name();
            return Err(Error::answered("post work requests to", device, answer));
        }
        Ok(())
    }

    /// Writes the works down as the device wants them.
    fn write_down(&mut self, chain: &mut Chain, count: usize) {
        self.wrs.clear();
        let mut first = chain.sges.as_mut_ptr();
        let next = self.oldest + self.outstanding.len() as u64;
        for (work, number) in chain.works[..count].iter().zip(next..) {
            self.unsignalled += 1;
            let is_last = self.wrs.len() + 1 == count;
            let is_told = is_last || self.unsignalled == self.shape.signal_every;
            if is_told {
                self.unsignalled = 0;
            }
            self.wrs.push(SendWr {
                wr_id: number,
                next: std::ptr::null_mut(),
                sg_list: first,
                // At most as many as `Shape::pieces` has, by `check`.
                num_sge: c_int::try_from(work.pieces).unwrap_or(0),
                opcode: match work.op {
                    Op::Read => abi::WR_READ,
                    Op::Write => abi::WR_WRITE,
                },
                send_flags: if is_told { abi::SIGNALED } else { 0 },
                imm_data: 0,
                remote_addr: work.remote.addr,
                rkey: work.remote.rkey,
                unused_52: [0; 19],
            });
            first = first.wrapping_add(work.pieces);
        }
        let start = self.wrs.as_mut_ptr();
        for at in 1..count {
            self.wrs[at - 1].next = start.wrapping_add(at);
        }
    }

    /// Fetches what has completed, and appends it in the order in which it was posted.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] where the device says nothing any more: shut it. [`Error::Forked`].
    pub(crate) fn poll(&mut self, out: &mut Vec<Completion>) -> Result<()> {
        self.made.device().check_here()?;
        let mut wcs: [Wc; POLLED] = std::array::from_fn(|_| Wc::default());
        while self.state != State::Shut {
            let fetched = self.made.poll(&mut wcs)?;
            for wc in &wcs[..fetched] {
                self.completed(wc, out);
            }
            if fetched < wcs.len() {
                break;
            }
        }
        Ok(())
    }

    /// A device completes requests in their order, and tells of all that fail. So those before one
    /// that it tells of have succeeded, if it has not told of them.
    fn completed(&mut self, wc: &Wc, out: &mut Vec<Completion>) {
        let before = wc.wr_id.checked_sub(self.oldest);
        let before = before.and_then(|before| usize::try_from(before).ok());
        let Some(before) = before.filter(|before| *before < self.outstanding.len()) else {
            // A device that tells of what it was not asked is not to be trusted with memory.
            self.state = State::Broken;
            return;
        };
        for _ in 0..before {
            self.retire(Ok(()), out);
        }
        let failure = Failure::of_status(wc.status, wc.vendor_err);
        if failure.is_some() {
            self.state = State::Broken;
        }
        self.retire(failure.map_or(Ok(()), Err), out);
    }

    /// Reports the oldest outstanding request, and lets its regions go.
    fn retire(&mut self, ended: std::result::Result<(), Failure>, out: &mut Vec<Completion>) {
        if let Some(Outstanding { id, pieces }) = self.outstanding.pop_front() {
            self.oldest += 1;
            self.held.drain(..pieces);
            out.push(Completion { id, ended });
        }
    }

    /// As [`QueuePair::poll`], and sleeps until something has completed or `until` has come, where
    /// nothing has.
    ///
    /// # Errors
    ///
    /// As there.
    pub(crate) fn wait(&mut self, until: Instant, out: &mut Vec<Completion>) -> Result<()> {
        let (before, state) = (out.len(), self.state);
        loop {
            self.poll(out)?;
            if out.len() > before || self.outstanding.is_empty() || self.state != state {
                return Ok(());
            }
            self.made.arm()?;
            // What has completed before that does not wake.
            self.poll(out)?;
            let left = until.saturating_duration_since(Instant::now());
            if out.len() > before || left.is_zero() {
                return Ok(());
            }
            sleep(self.made.channel_fd(), left);
            self.made.take_events();
        }
    }

    /// Ends it: after this no device touches what was posted, and each work request has been
    /// reported. Those that do not complete by `until`, which the device is first asked to give up,
    /// are reported with `failure`. Their regions are let go once the queue pair has been
    /// destroyed.
    pub(crate) fn shut(&mut self, until: Instant, failure: Failure, out: &mut Vec<Completion>) {
        if self.state == State::Shut {
            return;
        }
        let before = out.len();
        if self.made.device().is_here() {
            let mut attributes = QpAttr {
                qp_state: abi::STATE_ERR,
                ..QpAttr::default()
            };
            // A device that refuses is asked no more: destroying it ends everything, too.
            let asked = self.made.modify(&mut attributes, abi::ATTR_STATE);
            while asked.is_ok() && !self.outstanding.is_empty() && Instant::now() < until {
                if self.wait(until, out).is_err() {
                    break;
                }
            }
        }
        // The device gave them up because of this.
        for given_up in &mut out[before..] {
            if given_up.ended == Err(Failure::Flushed) {
                given_up.ended = Err(failure);
            }
        }
        self.state = State::Shut;
        if let Err(error) = self.made.destroy() {
            let kept = ManuallyDrop::new(std::mem::take(&mut self.held));
            tracing::error!("{error}; {} memory regions stay registered", kept.len());
        }
        let left = self.outstanding.drain(..).map(|work| Completion {
            id: work.id,
            ended: Err(failure),
        });
        out.extend(left);
        self.held.clear();
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.shut(Instant::now(), Failure::Shut, &mut Vec::new());
    }
}

/// Sleeps until a descriptor has something, or as long as is said.
fn sleep(fd: BorrowedFd<'_>, left: Duration) {
    // Longer than anything: it would not fit otherwise.
    let left = Timespec::try_from(left.min(Duration::from_secs(3600)));
    // An interruption is a short sleep.
    let _woken = poll(&mut [PollFd::new(&fd, PollFlags::IN)], left.ok().as_ref());
}
