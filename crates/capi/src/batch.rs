//! Batches of reads and writes, and what each request has come to.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_transfer::{Engine, Fault, Op, Options, Priority, Request, Status as Came, Task};

use crate::engine::Far;
use crate::given::{In, Out, Plain, maybe, span};
use crate::guard::{Failure, Status};
use crate::handle::{Made, Ref};

/// `kvd_request`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Given {
    /// Which way.
    pub op: u32,
    /// Zero.
    pub reserved: u32,
    /// Memory of this process.
    pub local: *mut c_void,
    /// Memory of a peer.
    pub remote: Ref<Far>,
    /// Where in that.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

// SAFETY: pointers and numbers.
unsafe impl Plain for Given {}

/// A batch under way, and the engine that carries it.
#[derive(Debug)]
pub struct Batch {
    task: Task,
    engine: Arc<Engine>,
}

/// The number of a status, as `kvd_moved` has it.
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
                let allowed = "KVD_FETCH or KVD_SEND";
                return Err(refuse("op", other.to_string(), allowed));
            }
        };
        if self.len == 0 {
            return Err(refuse("len", "0".to_owned(), "at least one byte"));
        }
        let remote = self.remote.get(&format!("requests[{at}].remote"))?;
        if !Arc::ptr_eq(&remote.engine, engine) {
            let allowed = "one that this engine has opened";
            return Err(refuse("remote", "another engine's".to_owned(), allowed));
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
            let allowed = "KVD_NORMAL, KVD_URGENT or KVD_BACKGROUND";
            return Err(Failure::input("priority", other, allowed));
        }
    };
    let timeout = maybe(timeout_ms).map_or(Duration::MAX, Duration::from_millis);
    Ok(Options { timeout, priority })
}

fn tell(task: &Task, moved: &Out<u8>, moved_len: usize) -> Result<(), Failure> {
    let all: Vec<u8> = task.statuses().map(number).collect();
    moved.fill("moved", moved_len, &all)
}

/// Refuses an array that is too short before anything is waited for.
fn room(moved_len: usize, requests: usize) -> Result<(), Failure> {
    match moved_len < requests {
        true => {
            let allowed = format!("at least {requests}");
            Err(Failure::input("moved_len", moved_len, allowed))
        }
        false => Ok(()),
    }
}

exported! {
    /// `kvd_engine_submit`.
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

    /// `kvd_engine_run`.
    fn kvd_engine_run(
        engine: Ref<Arc<Engine>>, given: In<Given>, given_len: usize, timeout_ms: u64,
        priority: u32, moved: Out<u8>, moved_len: usize,
    ) {
        let engine = engine.get("engine")?;
        room(moved_len, given_len)?;
        let requests = requests(given.slice("requests", given_len)?, engine)?;
        if given_len > 0 {
            moved.place("moved")?;
        }
        let task = engine.run(requests.into_iter(), options(timeout_ms, priority)?)?;
        tell(&task, &moved, moved_len)
    }

    /// `kvd_batch_wait`.
    fn kvd_batch_wait(batch: Ref<Batch>, timeout_ms: u64, moved: Out<u8>, moved_len: usize) {
        let task = &batch.get("batch")?.task;
        room(moved_len, task.len())?;
        let is_over = task.wait(span(timeout_ms));
        // What is known is told, too, where the time is over.
        tell(task, &moved, moved_len)?;
        match is_over {
            true => Ok(()),
            false => Err(Failure::new(
                Status::Timeout,
                format!("the batch still moves after {timeout_ms} ms"),
            )),
        }
    }

    /// `kvd_batch_cancel`. Nothing of it moves any more when it returns.
    fn kvd_batch_cancel(batch: Ref<Batch>) {
        let batch = batch.get("batch")?;
        batch.engine.cancel(&batch.task);
        Ok(())
    }

    /// `kvd_batch_free`. It cancels nothing.
    fn kvd_batch_free(batch: Ref<Batch>) {
        drop(batch.end());
        Ok(())
    }
}

/// The last of the numbers.
pub const MOVED_LAST: u8 = Fault::Closed as u8;

/// `kvd_moved_name`. Any number may come.
// SAFETY: the prefix is kvdepot's, and the header declares each name once.
#[unsafe(no_mangle)]
pub extern "C" fn kvd_moved_name(moved: i32) -> *const std::ffi::c_char {
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
    let known = usize::try_from(moved).ok().and_then(|at| NAMES.get(at));
    known.map_or(c"no outcome of kvdepot".as_ptr(), |name| name.as_ptr())
}
