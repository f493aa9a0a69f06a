//! Arrows that still run back up, by crate. The lists may only shrink: one that is not needed any
//! more fails its rule.

/// By crate, arrows from one name to another.
pub(crate) type Exceptions = &'static [(&'static str, &'static [(&'static str, &'static str)])];

/// Between rooms.
pub(crate) const ROOMS: Exceptions = &[
    ("media", &[("buffer", "memory")]),
    ("store", &[("devices", "pipeline")]),
];

/// Between files, of circles of three and more.
pub(crate) const PAIRS: Exceptions = &[
    (
        "cli",
        &[
            ("bench/alloc/mod.rs", "bench/alloc/single.rs"),
            ("bench/alloc/mod.rs", "bench/alloc/threads.rs"),
            ("bench/alloc/mod.rs", "bench/alloc/trace.rs"),
            ("bench/alloc/rebuild.rs", "bench/alloc/contenders.rs"),
            ("bench/alloc/spans.rs", "bench/alloc/contenders.rs"),
            ("bench/alloc/spans.rs", "bench/alloc/trace.rs"),
            ("bench/churn.rs", "bench/alloc/trace.rs"),
        ],
    ),
    (
        "store",
        &[
            ("pipeline/background.rs", "pipeline/mod.rs"),
            ("pipeline/ledger.rs", "pipeline/put.rs"),
            ("pipeline/replicate.rs", "pipeline/mod.rs"),
        ],
    ),
];
