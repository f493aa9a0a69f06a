//! A double of libibverbs: a device in this process, which carries at once, or fails as it is told.
//!
//! What a test wants of it, and what it has seen, belongs to the test's thread: all calls are made
//! there.

use super::super::abi::*;
use super::super::device::Device;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::Arc;

/// How the double behaves.
#[derive(Clone, Debug, Default)]
pub(super) struct Mood {
    /// Nothing that is posted is carried, and nothing of it is told, as of a peer that is lost.
    pub(super) is_silent: bool,
    /// What it has not carried when it is stopped it does not tell of either.
    pub(super) flushes_nothing: bool,
    /// So many work requests are taken, and the next one is refused.
    pub(super) takes: Option<usize>,
    /// Error numbers that the calls answer.
    pub(super) register: c_int,
    pub(super) take_back: c_int,
    pub(super) destroy: c_int,
    pub(super) connect: c_int,
    /// A completion of what was never posted.
    pub(super) invents: bool,
}

/// What was seen.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// Calls, and what tests add, in order.
    pub(super) events: Vec<&'static str>,
    /// Completions that succeeded.
    pub(super) told: usize,
    /// The path's MTU, as connected last.
    pub(super) mtu: c_int,
}

thread_local! {
    static MOOD: RefCell<Mood> = RefCell::default();
    static SEEN: RefCell<Seen> = RefCell::default();
    static KNOWN: RefCell<Vec<Known>> = RefCell::default();
}

struct Known {
    key: u32,
    addr: usize,
    len: usize,
    access: c_int,
}

pub(super) fn set(mood: Mood) {
    MOOD.set(mood);
}

fn mood() -> Mood {
    MOOD.with_borrow(Clone::clone)
}

pub(super) fn seen() -> Seen {
    SEEN.with_borrow(Clone::clone)
}

pub(super) fn note(event: &'static str) {
    SEEN.with_borrow_mut(|seen| seen.events.push(event));
}

/// One of its devices, `double0` or `double1`.
pub(crate) fn open(name: &str) -> Arc<Device> {
    Device::open_by(Arc::new(functions()), name).unwrap()
}

pub(super) fn functions() -> Functions {
    Functions {
        ibv_get_device_list: get_device_list,
        ibv_free_device_list: free_device_list,
        ibv_get_device_name: get_device_name,
        ibv_open_device: open_device,
        ibv_close_device: close_device,
        ibv_query_device: query_device,
        ibv_query_port: query_port,
        ibv_query_gid: query_gid,
        ibv_alloc_pd: alloc_pd,
        ibv_dealloc_pd: dealloc_pd,
        ibv_reg_mr: reg_mr,
        ibv_dereg_mr: dereg_mr,
        ibv_create_comp_channel: create_comp_channel,
        ibv_destroy_comp_channel: destroy_comp_channel,
        ibv_create_cq: create_cq,
        ibv_destroy_cq: destroy_cq,
        ibv_get_cq_event: get_cq_event,
        ibv_ack_cq_events: ack_cq_events,
        ibv_create_qp: create_qp,
        ibv_modify_qp: modify_qp,
        ibv_destroy_qp: destroy_qp,
    }
}

const NAMES: [&std::ffi::CStr; 2] = [c"double0", c"double1"];

/// A completion queue: what is told, and how many requests each completion makes room for.
#[repr(C)]
struct DoubleCq {
    base: Cq,
    done: VecDeque<(Wc, usize)>,
    fd: c_int,
    is_armed: bool,
    in_use: usize,
}

#[repr(C)]
struct DoubleQp {
    base: Qp,
    cq: *mut DoubleCq,
    depth: usize,
    pieces: usize,
    /// Not carried, while it is silent.
    left: Vec<u64>,
    /// Carried and not told of.
    untold: usize,
    has_failed: bool,
}

fn fail<T>(errno: c_int) -> *mut T {
    // SAFETY: the place of this thread's error number is writable.
    unsafe { *libc::__errno_location() = errno };
    std::ptr::null_mut()
}

unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut Listed {
    // SAFETY: the caller's number is writable.
    unsafe { *count = 2 };
    let list = NAMES.map(|name| name.as_ptr().cast_mut().cast::<Listed>());
    Box::into_raw(Box::new(list)).cast()
}

unsafe extern "C" fn free_device_list(list: *mut *mut Listed) {
    // SAFETY: as made above.
    drop(unsafe { Box::from_raw(list.cast::<[*mut Listed; 2]>()) });
}

unsafe extern "C" fn get_device_name(device: *mut Listed) -> *const c_char {
    device.cast_const().cast()
}

unsafe extern "C" fn open_device(device: *mut Listed) -> *mut Context {
    Box::into_raw(Box::new(Context {
        device,
        ops: Ops {
            unused_0: [0; 11],
            poll_cq: Some(poll_cq),
            req_notify_cq: Some(req_notify_cq),
            unused_13: [0; 12],
            post_send: Some(post_send),
            unused_26: [0; 6],
        },
    }))
}

unsafe extern "C" fn close_device(context: *mut Context) -> c_int {
    note("close");
    // SAFETY: as made above.
    drop(unsafe { Box::from_raw(context) });
    0
}

unsafe extern "C" fn query_device(_: *mut Context, attributes: *mut DeviceAttr) -> c_int {
    // SAFETY: the caller's attributes are writable.
    let attributes = unsafe { &mut *attributes };
    (attributes.max_qp_wr, attributes.max_cqe) = (256, 512);
    (attributes.max_sge, attributes.max_sge_rd) = (8, 4);
    (attributes.max_qp_rd_atom, attributes.max_qp_init_rd_atom) = (128, 128);
    attributes.phys_port_cnt = 2;
    0
}

/// The first port is down.
unsafe extern "C" fn query_port(_: *mut Context, port: u8, attributes: *mut PortAttr) -> c_int {
    // SAFETY: the caller's attributes are writable.
    let attributes = unsafe { &mut *attributes };
    attributes.state = if port == 1 { 1 } else { PORT_ACTIVE };
    (attributes.active_mtu, attributes.gid_tbl_len) = (5, 3);
    (attributes.max_msg_sz, attributes.link_layer) = (1 << 20, LINK_ETHERNET);
    0
}

unsafe extern "C" fn query_gid(_: *mut Context, _: u8, index: c_int, gid: *mut Gid) -> c_int {
    let mut bytes = [0; 16];
    match index {
        0 => bytes[..2].copy_from_slice(&[0xFE, 0x80]),
        1 => bytes[10..].copy_from_slice(&[0xFF, 0xFF, 10, 9, 0, 1]),
        _ => {}
    }
    // SAFETY: the caller's address is writable.
    unsafe { *gid = Gid(bytes) };
    0
}

unsafe extern "C" fn alloc_pd(context: *mut Context) -> *mut Pd {
    Box::into_raw(Box::new(context)).cast()
}

unsafe extern "C" fn dealloc_pd(pd: *mut Pd) -> c_int {
    // SAFETY: as made above.
    drop(unsafe { Box::from_raw(pd.cast::<*mut Context>()) });
    0
}

unsafe extern "C" fn reg_mr(
    pd: *mut Pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut Mr {
    if mood().register != 0 {
        return fail(mood().register);
    }
    KNOWN.with_borrow_mut(|known| {
        let key = known.iter().map(|one| one.key).max().unwrap_or(100) + 1;
        known.push(Known {
            key,
            addr: addr.addr(),
            len: length,
            access,
        });
        Box::into_raw(Box::new(Mr {
            context: std::ptr::null_mut(),
            pd,
            addr,
            length,
            handle: 0,
            lkey: key,
            rkey: key,
        }))
    })
}

unsafe extern "C" fn dereg_mr(mr: *mut Mr) -> c_int {
    note("take back");
    if mood().take_back != 0 {
        return mood().take_back;
    }
    // SAFETY: as made above.
    let mr = unsafe { Box::from_raw(mr) };
    KNOWN.with_borrow_mut(|known| known.retain(|one| one.key != mr.lkey));
    0
}

unsafe extern "C" fn create_comp_channel(context: *mut Context) -> *mut Channel {
    // SAFETY: a new descriptor.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    Box::into_raw(Box::new(Channel { context, fd }))
}

unsafe extern "C" fn destroy_comp_channel(channel: *mut Channel) -> c_int {
    // SAFETY: as made above.
    let channel = unsafe { Box::from_raw(channel) };
    // SAFETY: its own descriptor.
    unsafe { libc::close(channel.fd) }
}

unsafe extern "C" fn create_cq(
    context: *mut Context,
    _: c_int,
    _: *mut c_void,
    channel: *mut Channel,
    _: c_int,
) -> *mut Cq {
    Box::into_raw(Box::new(DoubleCq {
        base: Cq { context },
        done: VecDeque::new(),
        // SAFETY: as made above.
        fd: unsafe { (*channel).fd },
        is_armed: false,
        in_use: 0,
    }))
    .cast()
}

unsafe extern "C" fn destroy_cq(cq: *mut Cq) -> c_int {
    // SAFETY: as made above.
    drop(unsafe { Box::from_raw(cq.cast::<DoubleCq>()) });
    0
}

unsafe extern "C" fn get_cq_event(
    channel: *mut Channel,
    _: *mut *mut Cq,
    _: *mut *mut c_void,
) -> c_int {
    let mut count = 0_u64;
    // SAFETY: as made above; there is room for the descriptor's number.
    match unsafe { libc::read((*channel).fd, (&raw mut count).cast(), 8) } {
        8 => 0,
        _ => -1,
    }
}

unsafe extern "C" fn ack_cq_events(_: *mut Cq, _: c_uint) {}

unsafe extern "C" fn create_qp(pd: *mut Pd, attributes: *mut QpInitAttr) -> *mut Qp {
    // SAFETY: the caller's attributes are whole, and the domain as made above.
    let (attributes, context) = unsafe { (&*attributes, *pd.cast::<*mut Context>()) };
    Box::into_raw(Box::new(DoubleQp {
        base: Qp {
            context,
            qp_context: std::ptr::null_mut(),
            pd,
            send_cq: attributes.send_cq,
            recv_cq: attributes.recv_cq,
            srq: std::ptr::null_mut(),
            handle: 0,
            qp_num: 17,
        },
        cq: attributes.send_cq.cast(),
        depth: attributes.cap.max_send_wr as usize,
        pieces: attributes.cap.max_send_sge as usize,
        left: Vec::new(),
        untold: 0,
        has_failed: false,
    }))
    .cast()
}

unsafe extern "C" fn modify_qp(qp: *mut Qp, attributes: *mut QpAttr, _: c_int) -> c_int {
    // SAFETY: as made above, and the caller's attributes are whole.
    let (qp, attributes) = unsafe { (&mut *qp.cast::<DoubleQp>(), &*attributes) };
    match attributes.qp_state {
        STATE_RTR if mood().connect != 0 => return mood().connect,
        STATE_RTR => SEEN.with_borrow_mut(|seen| seen.mtu = attributes.path_mtu),
        STATE_ERR => {
            note("stop");
            qp.has_failed = true;
            if !mood().flushes_nothing {
                for id in std::mem::take(&mut qp.left) {
                    qp.tell(id, 5);
                }
            }
        }
        _ => {}
    }
    0
}

unsafe extern "C" fn destroy_qp(qp: *mut Qp) -> c_int {
    note("destroy");
    if mood().destroy != 0 {
        return mood().destroy;
    }
    // SAFETY: as made above.
    drop(unsafe { Box::from_raw(qp.cast::<DoubleQp>()) });
    0
}

unsafe extern "C" fn req_notify_cq(cq: *mut Cq, _: c_int) -> c_int {
    // SAFETY: as made above.
    unsafe { (*cq.cast::<DoubleCq>()).is_armed = true };
    0
}

unsafe extern "C" fn poll_cq(cq: *mut Cq, count: c_int, wcs: *mut Wc) -> c_int {
    // SAFETY: as made above.
    let cq = unsafe { &mut *cq.cast::<DoubleCq>() };
    let count = cq.done.len().min(count as usize);
    for (at, (wc, room)) in cq.done.drain(..count).enumerate() {
        cq.in_use -= room;
        // SAFETY: the caller has room for `count`.
        unsafe { *wcs.add(at) = wc };
    }
    count as c_int
}

unsafe extern "C" fn post_send(qp: *mut Qp, mut wr: *mut SendWr, bad: *mut *mut SendWr) -> c_int {
    // SAFETY: as made above, and its queue lives longer.
    let qp = unsafe { &mut *qp.cast::<DoubleQp>() };
    note("post");
    while !wr.is_null() {
        // SAFETY: the caller's list is whole.
        let one = unsafe { &*wr };
        let takes = MOOD.with_borrow_mut(|mood| match &mut mood.takes {
            Some(0) => false,
            Some(left) => {
                *left -= 1;
                true
            }
            None => true,
        });
        // SAFETY: its queue is there.
        let in_use = unsafe { &mut (*qp.cq).in_use };
        if !takes || *in_use == qp.depth || one.num_sge as usize > qp.pieces {
            // SAFETY: the caller's pointer is writable.
            unsafe { *bad = wr };
            return libc::ENOMEM;
        }
        *in_use += 1;
        qp.take(one);
        wr = one.next;
    }
    0
}

impl DoubleQp {
    fn take(&mut self, wr: &SendWr) {
        let id = if mood().invents {
            wr.wr_id + 1000
        } else {
            wr.wr_id
        };
        if self.has_failed {
            return self.tell(id, 5);
        }
        if mood().is_silent {
            return self.left.push(id);
        }
        // SAFETY: the caller's list is whole.
        let status = unsafe { carry(wr) };
        self.has_failed = status != 0;
        match status == 0 && wr.send_flags & SIGNALED == 0 {
            true => self.untold += 1,
            false => self.tell(id, status),
        }
    }

    fn tell(&mut self, wr_id: u64, status: c_int) {
        let wc = Wc {
            wr_id,
            status,
            ..Wc::default()
        };
        SEEN.with_borrow_mut(|seen| seen.told += usize::from(status == 0));
        // SAFETY: its queue is there.
        let cq = unsafe { &mut *self.cq };
        cq.done
            .push_back((wc, std::mem::take(&mut self.untold) + 1));
        if std::mem::take(&mut cq.is_armed) {
            // SAFETY: a number that lives as long as the call.
            unsafe { libc::write(cq.fd, (&raw const wr_id).cast(), 8) };
        }
    }
}

/// Carries a request between two regions of this process: its status.
///
/// # Safety
///
/// Its list of pieces is whole, and who registered the regions keeps them.
unsafe fn carry(wr: &SendWr) -> c_int {
    // SAFETY: as promised.
    let sges = unsafe { std::slice::from_raw_parts(wr.sg_list, wr.num_sge as usize) };
    let (local, remote) = match wr.opcode {
        WR_READ => (ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ),
        _ => (0, ACCESS_REMOTE_WRITE),
    };
    let mut at = wr.remote_addr as usize;
    for sge in sges {
        let (addr, len) = (sge.addr as usize, sge.length as usize);
        if !is_known(sge.lkey, addr, len, local) {
            return 4;
        }
        if !is_known(wr.rkey, at, len, remote) {
            return 10;
        }
        let here = std::ptr::with_exposed_provenance_mut::<u8>(addr);
        let there = std::ptr::with_exposed_provenance_mut::<u8>(at);
        let (from, to) = match wr.opcode {
            WR_READ => (there, here),
            _ => (here, there),
        };
        // SAFETY: both ranges were just found in regions, which are registered.
        unsafe { std::ptr::copy(from, to, len) };
        at += len;
    }
    0
}

fn is_known(key: u32, addr: usize, len: usize, access: c_int) -> bool {
    KNOWN.with_borrow(|known| {
        known.iter().any(|one| {
            let is_inside = addr >= one.addr && addr + len <= one.addr + one.len;
            one.key == key && is_inside && one.access & access == access
        })
    })
}
