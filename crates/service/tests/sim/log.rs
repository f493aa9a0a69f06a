//! What the depot logs as an error is one: nothing here may cause it.

use std::fmt::{Debug, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use kvdepot_testkit::sim::run::wrong;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Whether everything is printed (`SIM_LOG=1`).
static ALL: AtomicBool = AtomicBool::new(false);

/// Whether media fail on purpose.
static LOSSES: AtomicBool = AtomicBool::new(false);

/// Whether a medium that fails is no error from now on.
pub fn expect_losses(expected: bool) {
    LOSSES.store(expected, Ordering::Relaxed);
}

/// Whether ends of tiers break on purpose.
static BROKEN_ENDS: AtomicBool = AtomicBool::new(false);

/// Whether a copy that cannot be planned is no error from now on.
pub fn expect_broken_ends(expected: bool) {
    BROKEN_ENDS.store(expected, Ordering::Relaxed);
}

struct Errors;

/// Notes every error from now on.
pub fn listen() {
    ALL.store(std::env::var_os("SIM_LOG").is_some(), Ordering::Relaxed);
    tracing::subscriber::set_global_default(Errors).unwrap();
}

/// Prints a step where everything is printed.
pub fn step(step: &dyn Debug, nested: bool) {
    if ALL.load(Ordering::Relaxed) {
        let when = if nested { "  meanwhile" } else { "step" };
        println!("{when} {step:?}");
    }
}

/// Of this second, to draw a seed from.
pub fn nanoseconds() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| u64::from(since.subsec_nanos()))
}

impl Subscriber for Errors {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // An object store in this process says things, too.
        let ours = metadata.target().starts_with("kvdepot");
        ours && (*metadata.level() == Level::ERROR || ALL.load(Ordering::Relaxed))
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = String::new();
        event.record(&mut Fields(&mut text));
        if ALL.load(Ordering::Relaxed) {
            println!("{} {text}", event.metadata().level());
        }
        let lost = LOSSES.load(Ordering::Relaxed) && text.contains("medium error");
        let expected =
            lost || BROKEN_ENDS.load(Ordering::Relaxed) && text.contains("its medium is");
        if *event.metadata().level() == Level::ERROR && !expected {
            wrong(format!("the log has an error:{text}"));
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Fields<'a>(&'a mut String);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _infallible = write!(self.0, " {}={value:?}", field.name());
    }
}
