//! Logs: one structured line an event on standard error, from the level in `KVDEPOT_LOG` on.

use std::sync::OnceLock;

use kvdepot_store::config::ucm::log_level;
use pyo3::prelude::*;
use tracing_subscriber::filter::LevelFilter;

use crate::errors;

const VARIABLE: &str = "KVDEPOT_LOG";

/// Starts logging, at the first call that has something to say.
pub(crate) fn start(py: Python<'_>) -> PyResult<()> {
    static STARTED: OnceLock<Result<(), String>> = OnceLock::new();
    let started = STARTED.get_or_init(|| {
        let text = std::env::var(VARIABLE);
        let text = text.unwrap_or_else(|_| log_level().unwrap_or_default().to_owned());
        let level = match text.trim().to_ascii_lowercase().as_str() {
            "" => LevelFilter::WARN,
            "off" => LevelFilter::OFF,
            "error" => LevelFilter::ERROR,
            "warn" => LevelFilter::WARN,
            "info" => LevelFilter::INFO,
            "debug" => LevelFilter::DEBUG,
            "trace" => LevelFilter::TRACE,
            _ => return Err(text),
        };
        // An embedding program may have its own; then that one gets the events.
        let _installed = tracing_subscriber::fmt()
            .with_max_level(level)
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .try_init();
        Ok(())
    });
    started.clone().map_err(|text| {
        errors::config(
            py,
            VARIABLE,
            format!("{text:?}"),
            "off, error, warn, info, debug or trace",
        )
    })
}
