//! What the library makes for a queue pair, and the calls of a driver.

use super::super::abi::{self, Channel, Cq, Qp, QpAttr, QpCap, QpInitAttr, SendWr, Wc};
use super::super::device::Device;
use super::super::error::{Error, Result};
use super::Shape;
use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// A queue pair with the queue that its completions come to, and the descriptor that they wake.
#[derive(Debug)]
pub(super) struct Made {
    device: Arc<Device>,
    channel: NonNull<Channel>,
    cq: Option<NonNull<Cq>>,
    qp: Option<NonNull<Qp>>,
    qpn: u32,
}

impl Made {
    /// With as much room for completions as there may be work requests: each that fails has one.
    pub(super) fn new(device: &Arc<Device>, shape: &Shape) -> Result<Self> {
        let (functions, context) = (device.functions(), device.context());
        // SAFETY: the context is open for as long as the device, which `made` will have.
        let channel = NonNull::new(unsafe { (functions.ibv_create_comp_channel)(context) });
        let channel =
            channel.ok_or_else(|| Error::last("create a completion channel on", device.name()))?;
        // From here on the drop destroys what there is.
        let mut made = Self {
            device: Arc::clone(device),
            channel,
            cq: None,
            qp: None,
            qpn: 0,
        };
        let flags = rustix::fs::OFlags::NONBLOCK;
        rustix::fs::fcntl_setfl(made.channel_fd(), flags).map_err(|errno| Error::Os {
            operation: "create a completion channel on",
            subject: device.name().to_owned(),
            source: errno.into(),
        })?;
        let depth = c_int::from(shape.depth);
        let none = std::ptr::null_mut();
        // SAFETY: context and channel were made for each other, and the queue goes before both.
        let cq = unsafe { (functions.ibv_create_cq)(context, depth, none, channel.as_ptr(), 0) };
        let cq = NonNull::new(cq);
        let cq = cq.ok_or_else(|| Error::last("create a completion queue on", device.name()))?;
        made.cq = Some(cq);
        let mut attributes = QpInitAttr {
            qp_context: none,
            send_cq: cq.as_ptr(),
            recv_cq: cq.as_ptr(),
            srq: none,
            cap: QpCap {
                max_send_wr: shape.depth.into(),
                // Nothing is ever received; some drivers refuse none.
                max_recv_wr: 1,
                max_send_sge: shape.pieces.into(),
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: abi::QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: domain and queue are there for as long as `made` is, whose drop ends this first.
        let qp = unsafe { (functions.ibv_create_qp)(device.pd(), &raw mut attributes) };
        let qp = NonNull::new(qp);
        let qp = qp.ok_or_else(|| Error::last("create a queue pair on", device.name()))?;
        made.qp = Some(qp);
        // SAFETY: the library has just made it.
        made.qpn = unsafe { qp.as_ref() }.qp_num;
        Ok(made)
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn qpn(&self) -> u32 {
        self.qpn
    }

    /// The queue pair, and the queue of its completions, until they are destroyed.
    fn parts(&self) -> Result<(*mut Qp, *mut Cq)> {
        match (self.qp, self.cq) {
            (Some(qp), Some(cq)) => Ok((qp.as_ptr(), cq.as_ptr())),
            _ => Err(Error::Shut),
        }
    }

    fn check(&self, operation: &'static str, answer: c_int) -> Result<()> {
        Error::check(operation, self.device.name(), answer)
    }

    pub(super) fn modify(&mut self, attributes: &mut QpAttr, mask: c_int) -> Result<()> {
        let (qp, _) = self.parts()?;
        // SAFETY: `parts` gave a queue pair that is there, and the attributes are whole.
        let answer = unsafe { (self.device.functions().ibv_modify_qp)(qp, attributes, mask) };
        let operation = match attributes.qp_state {
            abi::STATE_INIT => "initialize a queue pair of",
            abi::STATE_ERR => "stop a queue pair of",
            _ => "connect a queue pair of",
        };
        self.check(operation, answer)
    }

    /// Posts a list of work requests. What the device answers, and how many it took.
    ///
    /// # Safety
    ///
    /// The requests are linked in order, and what they point to is there during the call. The
    /// memory that they name stays registered until they have completed, or this is destroyed.
    pub(super) unsafe fn post(&mut self, wrs: &mut [SendWr]) -> (c_int, usize) {
        let Ok((qp, _)) = self.parts() else {
            return (libc::EINVAL, 0);
        };
        let mut bad: *mut SendWr = std::ptr::null_mut();
        let first = wrs.as_mut_ptr();
        // SAFETY: `parts` gave a queue pair that is there; its context is for as long as the
        // device. The requests are as the caller promises.
        let answer = unsafe {
            let ops = &(*(*qp).context).ops;
            ops.post_send
                .map_or(libc::ENOSYS, |post| post(qp, first, &raw mut bad))
        };
        if answer == 0 {
            return (0, wrs.len());
        }
        let taken = bad.addr().wrapping_sub(first.addr()) / size_of::<SendWr>();
        // Where it does not say which one was wrong, it may have taken any.
        (answer, taken.min(wrs.len()))
    }

    /// Fetches completions: how many there were.
    pub(super) fn poll(&self, wcs: &mut [Wc]) -> Result<usize> {
        let (_, cq) = self.parts()?;
        let count = c_int::try_from(wcs.len()).unwrap_or(c_int::MAX);
        // SAFETY: `parts` gave a queue that is there, and its context is for as long as the device;
        // there is room for as many completions as is said.
        let answer = unsafe {
            let ops = &(*(*cq).context).ops;
            ops.poll_cq
                .map_or(-libc::ENOSYS, |poll| poll(cq, count, wcs.as_mut_ptr()))
        };
        match usize::try_from(answer) {
            Ok(fetched) => Ok(fetched.min(wcs.len())),
            Err(_) => Err(Error::answered(
                "poll for completions of",
                self.device.name(),
                answer.saturating_neg(),
            )),
        }
    }

    /// Has the next completion wake the channel.
    pub(super) fn arm(&self) -> Result<()> {
        let (_, cq) = self.parts()?;
        // SAFETY: as in `poll`.
        let answer = unsafe {
            let ops = &(*(*cq).context).ops;
            ops.req_notify_cq.map_or(libc::ENOSYS, |arm| arm(cq, 0))
        };
        self.check("request completion events of", answer)
    }

    /// Takes what woke the channel, if anything did.
    pub(super) fn take_events(&mut self) {
        let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        let functions = self.device.functions();
        // SAFETY: the channel is there, and does not block; both pointers are writable.
        while unsafe {
            (functions.ibv_get_cq_event)(self.channel.as_ptr(), &raw mut cq, &raw mut context)
        } == 0
        {
            // SAFETY: the channel has one queue, which is there, and whose event was just taken.
            unsafe { (functions.ibv_ack_cq_events)(cq, 1) };
        }
    }

    /// What completions wake.
    pub(super) fn channel_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the library made the channel, and closes its descriptor only in the drop.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }

    /// Destroys the queue pair: afterwards its device touches nothing because of it.
    pub(super) fn destroy(&mut self) -> Result<()> {
        let Some(qp) = self.qp.take() else {
            return Ok(());
        };
        // A child shares its parent's descriptor: what it destroys is its parent's.
        if !self.device.is_here() {
            return Ok(());
        }
        // SAFETY: the library made it, and it has just been taken from where others find it.
        let answer = unsafe { (self.device.functions().ibv_destroy_qp)(qp.as_ptr()) };
        self.check("destroy a queue pair of", answer)
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        // The owner destroys it itself, unless it was never finished.
        if let Err(error) = self.destroy() {
            tracing::error!("{error}");
        }
        if !self.device.is_here() {
            return;
        }
        let functions = self.device.functions();
        if let Some(cq) = self.cq.take() {
            // SAFETY: the library made it, and all its events were acknowledged. Where a queue pair
            // could not be destroyed, it is refused and stays.
            unsafe { (functions.ibv_destroy_cq)(cq.as_ptr()) };
        }
        // SAFETY: as above; nothing borrows its descriptor any more.
        unsafe { (functions.ibv_destroy_comp_channel)(self.channel.as_ptr()) };
    }
}
