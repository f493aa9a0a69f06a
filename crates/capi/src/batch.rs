//! Batches of reads and writes, and the status of each request.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_transfer::{Engine, Fault, Op, Options, Priority, Request, Status as Came, Task};

use crate::engine::Far;
use crate::given::{In, Out, Plain, maybe, span};
use crate::guard::{Failure, Status};
use crate::handle::{Made, Ref};

/// One range to copy, `kvd_request`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Given {
    /// A `kvd_op`.
    pub op: u32,
    /// Reserved; 0.
    pub reserved: u32,
    /// Registered memory of this process.
    pub local: *mut c_void,
    /// Segment of a peer.
    pub remote: Ref<Far>,
    /// Offset in the segment in bytes.
    pub offset: u64,
    /// Number of bytes, at least 1.
    pub len: u64,
}

// SAFETY: pointers and numbers.
unsafe impl Plain for Given {}

/// A submitted batch, and its engine.
#[derive(Debug)]
pub struct Batch {
    task: Task,
    engine: Arc<Engine>,
}

/// Converts a status into a `kvd_transfer_status`.
fn number(status: Came) -> u8 {
    match status {
        Came::Pending => 0,
        Came::Done => 1,
        Came::Failed(fault) => fault as u8,
    }
}

impl Given {
    fn request(&self, at: usize, engine: &Arc<Engine>) -> Result<Request<'_>, Failure> {
        let refuse = |field: &str, value: String, allowed: &str| {
            Failure::input(format!("requests[{at}].{field}"), value, allowed)
        };
        if self.reserved != 0 {
            return Err(refuse("reserved", self.reserved.to_string(), "0"));
        }
        let op = match self.op {
            0 => Op::Read,
            1 => Op::Write,
            other => {
                let allowed = "KVD_OP_READ or KVD_OP_WRITE";
                return Err(refuse("op", other.to_string(), allowed));
            }
        };
        if self.len == 0 {
            return Err(refuse("len", "0".to_owned(), "at least one byte"));
        }
        let remote = self.remote.get(&format!("requests[{at}].remote"))?;
        if !Arc::ptr_eq(&remote.engine, engine) {
            let allowed = "a remote that this engine opened";
            return Err(refuse(
                "remote",
                "a remote of another engine".to_owned(),
                allowed,
            ));
        }
        Ok(Request {
            op,
            local: self.local.addr() as u64,
            remote: &remote.remote,
            offset: self.offset,
            len: self.len,
        })
    }
}

fn requests<'g>(given: &'g [Given], engine: &Arc<Engine>) -> Result<Vec<Request<'g>>, Failure> {
    let each = given.iter().enumerate();
    each.map(|(at, one)| one.request(at, engine)).collect()
}

fn options(timeout_ms: u64, priority: u32) -> Result<Options, Failure> {
    let priority = match priority {
        0 => Priority::Normal,
        1 => Priority::Urgent,
        2 => Priority::Background,
        other => {
            let allowed = "KVD_PRIORITY_NORMAL, KVD_PRIORITY_URGENT or KVD_PRIORITY_BACKGROUND";
            return Err(Failure::input("priority", other, allowed));
        }
    };
    let timeout = maybe(timeout_ms).map_or(Duration::MAX, Duration::from_millis);
    Ok(Options { timeout, priority })
}

fn tell(task: &Task, statuses: &Out<u8>, statuses_len: usize) -> Result<(), Failure> {
    let all: Vec<u8> = task.statuses().map(number).collect();
    statuses.fill("statuses", statuses_len, &all)
}

/// Rejects an array that is too short, before the call waits.
fn room(statuses_len: usize, requests: usize) -> Result<(), Failure> {
    match statuses_len < requests {
        true => {
            let allowed = format!("at least {requests}");
            Err(Failure::input("statuses_len", statuses_len, allowed))
        }
        false => Ok(()),
    }
}

exported! {
    /// Implements `kvd_engine_submit`.
    fn kvd_engine_submit(
        engine: Ref<Arc<Engine>>, given: In<Given>, given_len: usize, timeout_ms: u64,
        priority: u32, batch: Made<Batch>,
    ) {
        let batch = batch.making("batch")?;
        let engine = engine.get("engine")?;
        let requests = requests(given.slice("requests", given_len)?, engine)?;
        let task = engine.submit(requests.into_iter(), options(timeout_ms, priority)?)?;
        let engine = Arc::clone(engine);
        batch.put(Batch { task, engine });
        Ok(())
    }

    /// Implements `kvd_engine_run`.
    fn kvd_engine_run(
        engine: Ref<Arc<Engine>>, given: In<Given>, given_len: usize, timeout_ms: u64,
        priority: u32, statuses: Out<u8>, statuses_len: usize,
    ) {
        let engine = engine.get("engine")?;
        room(statuses_len, given_len)?;
        let requests = requests(given.slice("requests", given_len)?, engine)?;
        if given_len > 0 {
            statuses.place("statuses")?;
        }
        let task = engine.run(requests.into_iter(), options(timeout_ms, priority)?)?;
        tell(&task, &statuses, statuses_len)
    }

    /// Implements `kvd_batch_wait`.
    fn kvd_batch_wait(batch: Ref<Batch>, timeout_ms: u64, statuses: Out<u8>, statuses_len: usize) {
        let task = &batch.get("batch")?.task;
        room(statuses_len, task.len())?;
        let is_over = task.wait(span(timeout_ms));
        // After a time-out, the statuses that are known are returned too.
        tell(task, &statuses, statuses_len)?;
        match is_over {
            true => Ok(()),
            false => Err(Failure::new(
                Status::Timeout,
                format!("the batch is still in progress after {timeout_ms} ms"),
            )),
        }
    }

    /// Implements `kvd_batch_cancel`. All copies of the batch have ended when it returns.
    fn kvd_batch_cancel(batch: Ref<Batch>) {
        let batch = batch.get("batch")?;
        batch.engine.cancel(&batch.task);
        Ok(())
    }

    /// Implements `kvd_batch_free`. The batch continues.
    fn kvd_batch_free(batch: Ref<Batch>) {
        drop(batch.end());
        Ok(())
    }
}

/// Largest `kvd_transfer_status`.
pub const MOVED_LAST: u8 = Fault::Closed as u8;

/// Implements `kvd_transfer_status_name`; any number is allowed.
// SAFETY: the prefix is kvdepot's, and the header declares each name once.
#[unsafe(no_mangle)]
pub extern "C" fn kvd_transfer_status_name(status: i32) -> *const std::ffi::c_char {
    const NAMES: [&std::ffi::CStr; MOVED_LAST as usize + 1] = [
        c"pending",
        c"done",
        c"local",
        c"range",
        c"rights",
        c"unknown",
        c"checksum",
        c"failed",
        c"lost",
        c"timed out",
        c"cancelled",
        c"closed",
    ];
    let known = usize::try_from(status).ok().and_then(|at| NAMES.get(at));
    known.map_or(c"unknown outcome".as_ptr(), |name| name.as_ptr())
}
