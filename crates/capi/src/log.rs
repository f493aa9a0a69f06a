//! The log: events of `tracing`, passed to a callback of the program as one line each.
//!
//! The library logs nothing until a callback is set. In a Rust program with its own `tracing`
//! subscriber, that subscriber receives the events, and no callback can be set.

use std::cell::Cell;
use std::ffi::{CString, c_char, c_void};
use std::fmt::{self, Write as _};
use std::sync::OnceLock;

use kvdepot_store::Origin;
use parking_lot::RwLock;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, set_global_default};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::guard::{Failure, Status};

/// The callback, `kvd_log_fn`.
pub type LogFn = Option<
    unsafe extern "C" fn(user: *mut c_void, level: u32, target: *const c_char, line: *const c_char),
>;

/// The callback and its least severe level.
struct Told {
    call: LogFn,
    user: *mut c_void,
    level: LevelFilter,
}

// SAFETY: the header asks for a function, and something of the user's, for all threads.
unsafe impl Send for Told {}
// SAFETY: as above.
unsafe impl Sync for Told {}

static TOLD: RwLock<Told> = RwLock::new(Told {
    call: None,
    user: std::ptr::null_mut(),
    level: LevelFilter::OFF,
});

/// The process that set the callback first; its forks do not log.
static ORIGIN: OnceLock<Origin> = OnceLock::new();

thread_local! {
    /// True while the callback runs in this thread: events of its own calls are discarded.
    static IS_TELLING: Cell<bool> = const { Cell::new(false) };
}

fn level_of(number: u32) -> Option<LevelFilter> {
    Some(match number {
        0 => LevelFilter::OFF,
        1 => LevelFilter::ERROR,
        2 => LevelFilter::WARN,
        3 => LevelFilter::INFO,
        4 => LevelFilter::DEBUG,
        5 => LevelFilter::TRACE,
        _ => return None,
    })
}

fn number_of(level: Level) -> u32 {
    match level {
        Level::ERROR => 1,
        Level::WARN => 2,
        Level::INFO => 3,
        Level::DEBUG => 4,
        Level::TRACE => 5,
    }
}

/// An event as one line: its message, then its fields.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a `String` does not fail.
        let _written = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

struct Teller;

impl Subscriber for Teller {
    fn register_callsite(&self, _of: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }

    fn enabled(&self, of: &Metadata<'_>) -> bool {
        let is_here = ORIGIN.get().is_some_and(|origin| origin.is_here());
        // In a forked process, a lock may be held forever by a thread of the parent.
        is_here && !IS_TELLING.get() && *of.level() <= TOLD.read_recursive().level
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(TOLD.read_recursive().level)
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        let line = format!("{}{}", line.message, line.fields).replace('\0', "?");
        let line = CString::new(line).unwrap_or_default();
        let target = CString::new(event.metadata().target()).unwrap_or_default();
        let level = number_of(*event.metadata().level());
        let told = TOLD.read_recursive();
        let Some(call) = told.call else {
            return;
        };
        IS_TELLING.set(true);
        // SAFETY: the program's function, which by the header does not throw, and what it has asked
        // to be given; who takes its place waits for the lock.
        unsafe { call(told.user, level, target.as_ptr(), line.as_ptr()) };
        IS_TELLING.set(false);
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// Sets the subscriber of the process, once.
fn install() -> Result<(), Failure> {
    static IS_INSTALLED: OnceLock<bool> = OnceLock::new();
    let origin = Origin::here().map_err(kvdepot_store::Error::from)?;
    let _earlier = ORIGIN.get_or_init(|| origin);
    if !ORIGIN.get().is_some_and(|origin| origin.is_here()) {
        return Err(Failure::forked());
    }
    match *IS_INSTALLED.get_or_init(|| set_global_default(Teller).is_ok()) {
        true => Ok(()),
        false => Err(Failure::new(
            Status::System,
            "this program already has a Rust log subscriber, which receives all messages",
        )),
    }
}

exported! {
    /// Implements `kvd_log`. When it returns, no other thread runs the previous callback.
    fn kvd_log(call: LogFn, user: *mut c_void, level: u32) {
        let Some(filter) = level_of(level) else {
            let allowed = "KVD_LOG_OFF to KVD_LOG_TRACE";
            return Err(Failure::input("level", level, allowed));
        };
        if call.is_none() && filter != LevelFilter::OFF {
            return Err(Failure::input("log", "NULL", "a function, or KVD_LOG_OFF"));
        }
        if IS_TELLING.get() {
            let allowed = "a call from outside the log function";
            return Err(Failure::input("log", "a call from within the log function", allowed));
        }
        install()?;
        *TOLD.write() = Told { call, user, level: filter };
        tracing::callsite::rebuild_interest_cache();
        Ok(())
    }
}
