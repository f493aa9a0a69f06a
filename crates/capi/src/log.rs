//! What the library has to say beside its answers, told to a function of the program's.
//!
//! Events of `tracing`, of which the program gets one line each. The library is silent until it is
//! asked, and in a program in Rust that has a subscriber of its own it stays out of its way.

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

/// `kvd_log_fn`.
pub type LogFn = Option<
    unsafe extern "C" fn(user: *mut c_void, level: u32, target: *const c_char, line: *const c_char),
>;

/// Who is told, and from which level on.
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

/// The process whose locks those are.
static ORIGIN: OnceLock<Origin> = OnceLock::new();

thread_local! {
    /// Whether the program's function is running here: what it does is not told to itself.
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

/// An event as one line: its message, and its fields behind.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Nothing written to a text fails.
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
        // A fork may have a lock that is held for ever, of another thread's.
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

/// Has the events come here, once.
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
            "this program has a log of its own, in Rust, which is told everything",
        )),
    }
}

exported! {
    /// `kvd_log`. No other thread is in the function that was told before when it returns.
    fn kvd_log(call: LogFn, user: *mut c_void, level: u32) {
        let Some(filter) = level_of(level) else {
            let allowed = "KVD_LOG_OFF to KVD_LOG_TRACE";
            return Err(Failure::input("level", level, allowed));
        };
        if call.is_none() && filter != LevelFilter::OFF {
            return Err(Failure::input("log", "NULL", "a function, or KVD_LOG_OFF"));
        }
        if IS_TELLING.get() {
            let allowed = "another thread than that which is being told";
            return Err(Failure::input("log", "a call from within it", allowed));
        }
        install()?;
        *TOLD.write() = Told { call, user, level: filter };
        tracing::callsite::rebuild_interest_cache();
        Ok(())
    }
}
