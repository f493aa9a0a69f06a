//! Data that the HTTP server shows.

use kvdepot_store::Stats;
use serde_json::Value;

/// A depot, as the HTTP server reads it.
pub(crate) trait Source: Send + Sync {
    /// Returns counters and usage.
    fn stats(&self) -> Stats;

    /// Returns the object that `kvdepot stat --json` prints, with these statistics.
    fn report(&self, stats: &Stats) -> Value;

    /// Returns the cause if the depot rejects calls.
    fn rejection(&self) -> Option<&'static str>;
}

/// A depot that exists in tests only.
#[cfg(test)]
pub(super) mod double {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use kvdepot_store::Stats;
    use serde_json::{Value, json};

    use super::Source;

    #[derive(Default)]
    pub(in crate::http) struct Double {
        pub(in crate::http) reads: AtomicU64,
        pub(in crate::http) is_closing: AtomicBool,
    }

    impl Source for Arc<Double> {
        fn stats(&self) -> Stats {
            let reads = self.reads.fetch_add(1, Ordering::SeqCst) + 1;
            let mut stats = Stats::empty(&["Cache".to_owned()]);
            stats.missed_blocks = reads;
            stats
        }

        fn report(&self, stats: &Stats) -> Value {
            json!({ "stats": stats.shown() })
        }

        fn rejection(&self) -> Option<&'static str> {
            let is_closing = self.is_closing.load(Ordering::SeqCst);
            is_closing.then_some("the depot is closing")
        }
    }
}
