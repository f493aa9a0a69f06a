//! When to save: `kvdepot.sessions.Policy`.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvdepot_session::policy::{Answer, Error, Origin, Policy as Store, Prompt, Settings, Writes};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::devices::size_of;
use crate::errors;

/// Decides when an engine saves a checkpoint, with the names and defaults of ds4.
///
/// The engine reports its progress in tokens; the policy returns a save that is due. In
/// `kvdepot.sessions` it is `Policy` or `policy`. docs/design/sessions.md lists the reasons for a
/// save.
///
/// Args:
///     disk_space: Most bytes on disk, or a text such as "64GiB". Larger checkpoints are declined.
///         Default: 4 GiB.
///     min_tokens: Shortest checkpoint, in tokens. Default: 512.
///     cold_max_tokens: Longest cold checkpoint, in tokens; 0: none are saved. Default: 30,000.
///     continued_interval_tokens: Tokens between continued checkpoints, rounded up to the
///         alignment; 0: none are saved. Default: 10,000.
///     boundary_trim_tokens: Tokens at the end of the prompt that a cold checkpoint omits. Default:
///         32.
///     boundary_align_tokens: Alignment of cold checkpoints and of the interval, in tokens; 0:
///         none. Default: 2,048.
///     write_budget_hour: Most bytes written in any hour. Default: no limit.
///     write_budget_day: Most bytes written in any day. Default: no limit.
///     token_bytes: Estimated bytes per token. Default: 13,800.
///     fixed_bytes: Estimated bytes of a checkpoint regardless of its length. Default: 23 MiB.
///     prefixes: The engine can save and restore the first tokens of a state.
///     whole: Each save writes the whole state instead of new parts only.
///
/// Raises:
///     ConfigError: A setting is not allowed.
///     InputError: A size is not allowed.
#[pyclass(frozen, module = "kvdepot.sessions")]
pub(crate) struct Policy(Arc<Mutex<Store>>);

impl Policy {
    /// The policy, for a save that ends when nobody of Python listens.
    pub(crate) fn shared(&self) -> Arc<Mutex<Store>> {
        Arc::clone(&self.0)
    }
}

/// Seconds since 1970, or now.
pub(crate) fn now(given: Option<f64>) -> Duration {
    let clock = || {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        since.unwrap_or_default()
    };
    let given = given.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    given.unwrap_or_else(clock)
}

fn raise(py: Python<'_>, error: Error) -> PyErr {
    match error {
        Error::Setting {
            field,
            value,
            allowed,
        } => errors::config(py, field, value, allowed),
        other => errors::other(py, other.to_string()),
    }
}

fn shown(py: Python<'_>, answer: Answer) -> PyResult<Option<Bound<'_, PyDict>>> {
    let said = PyDict::new(py);
    match answer {
        Answer::Save(save) => {
            said.set_item("save", save.id)?;
            said.set_item("tokens", save.tokens)?;
            said.set_item("base", save.base)?;
            said.set_item("reason", save.reason.name())?;
            said.set_item("bytes", save.bytes)?;
        }
        Answer::Declined(why) => said.set_item("declined", why.name())?,
        _ => return Ok(None),
    }
    Ok(Some(said))
}

fn size(field: &'static str, value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<u64>> {
    value.map(|value| size_of(field, value)).transpose()
}

#[pymethods]
impl Policy {
    #[new]
    #[pyo3(signature = (
        *, disk_space = None, min_tokens = None, cold_max_tokens = None,
        continued_interval_tokens = None, boundary_trim_tokens = None,
        boundary_align_tokens = None, write_budget_hour = None, write_budget_day = None,
        token_bytes = None, fixed_bytes = None, prefixes = false, whole = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "one a setting")]
    fn new(
        py: Python<'_>,
        disk_space: Option<&Bound<'_, PyAny>>,
        min_tokens: Option<u64>,
        cold_max_tokens: Option<u64>,
        continued_interval_tokens: Option<u64>,
        boundary_trim_tokens: Option<u64>,
        boundary_align_tokens: Option<u64>,
        write_budget_hour: Option<&Bound<'_, PyAny>>,
        write_budget_day: Option<&Bound<'_, PyAny>>,
        token_bytes: Option<u64>,
        fixed_bytes: Option<&Bound<'_, PyAny>>,
        prefixes: bool,
        whole: bool,
    ) -> PyResult<Policy> {
        let usual = Settings::default();
        let settings = Settings {
            disk_space: size("disk_space", disk_space)?.unwrap_or(usual.disk_space),
            min_tokens: min_tokens.unwrap_or(usual.min_tokens),
            cold_max_tokens: cold_max_tokens.unwrap_or(usual.cold_max_tokens),
            continued_interval_tokens: continued_interval_tokens
                .unwrap_or(usual.continued_interval_tokens),
            boundary_trim_tokens: boundary_trim_tokens.unwrap_or(usual.boundary_trim_tokens),
            boundary_align_tokens: boundary_align_tokens.unwrap_or(usual.boundary_align_tokens),
            write_budget_hour: size("write_budget_hour", write_budget_hour)?,
            write_budget_day: size("write_budget_day", write_budget_day)?,
            writes: if whole { Writes::Whole } else { Writes::Delta },
            saves_prefixes: prefixes,
            fixed_bytes: size("fixed_bytes", fixed_bytes)?.unwrap_or(usual.fixed_bytes),
            token_bytes: token_bytes.unwrap_or(usual.token_bytes),
        };
        let made = Store::new(settings).map_err(|error| raise(py, error))?;
        Ok(Policy(Arc::new(Mutex::new(made))))
    }

    /// Reports that a prompt starts in a slot.
    ///
    /// Args:
    ///     tokens: Tokens of the prompt, including reused ones.
    ///     restored: Tokens that were loaded from disk. At most one of `restored` and `live` is
    ///         allowed.
    ///     live: Tokens of the slot that stay in memory.
    ///     anchor: Tokens before the last user message that precedes the first answer, if the
    ///         engine knows them.
    ///     slot: Number of the slot, chosen by the caller.
    ///
    /// Raises:
    ///     InputError: Both `restored` and `live` were given.
    #[pyo3(signature = (tokens, *, restored = None, live = None, anchor = None, slot = 0))]
    fn start(
        &self,
        py: Python<'_>,
        tokens: u64,
        restored: Option<u64>,
        live: Option<u64>,
        anchor: Option<u64>,
        slot: u32,
    ) -> PyResult<()> {
        let origin = match (restored, live) {
            (None, None) => Origin::Empty,
            (Some(tokens), None) => Origin::Restored(tokens),
            (None, Some(tokens)) => Origin::Live(tokens),
            (Some(tokens), Some(_)) => {
                return Err(errors::input(
                    py,
                    "restored",
                    tokens,
                    "either restored or live, not both",
                ));
            }
        };
        let prompt = Prompt {
            tokens,
            origin,
            anchor,
        };
        self.0.lock().start(slot, &prompt);
        Ok(())
    }

    /// Returns the position at which prefill should stop and report next.
    ///
    /// Args:
    ///     slot: Number of the slot.
    ///
    /// Returns:
    ///     A number of tokens; None if no stop is needed.
    #[pyo3(signature = (*, slot = 0))]
    fn next_stop(&self, slot: u32) -> Option<u64> {
        self.0.lock().next_stop(slot)
    }

    /// Reports the progress of prefill.
    ///
    /// Args:
    ///     tokens: Tokens of the slot in memory now.
    ///     slot: Number of the slot.
    ///     at: Time in seconds since 1970. Default: now.
    ///
    /// Returns:
    ///     None if no save is due. A dictionary with `save`, `tokens`, `base`, `reason` and `bytes`
    ///     for a save: write `tokens` tokens, of which the first `base` are on disk, in at most
    ///     `bytes` bytes. A dictionary with `declined`, the reason, for one that is not granted.
    #[pyo3(signature = (tokens, *, slot = 0, at = None))]
    fn prefill<'py>(
        &self,
        py: Python<'py>,
        tokens: u64,
        slot: u32,
        at: Option<f64>,
    ) -> PyResult<Option<Bound<'py, PyDict>>> {
        let answer = self.0.lock().prefill(slot, tokens, now(at));
        shown(py, answer)
    }

    /// Reports the progress of decoding.
    ///
    /// Args:
    ///     tokens: Tokens of the slot in memory now. Fewer than before mean that the conversation
    ///         was cut back.
    ///     slot: Number of the slot.
    ///     at: Time in seconds since 1970. Default: now.
    ///
    /// Returns:
    ///     The answer, as `prefill`.
    #[pyo3(signature = (tokens, *, slot = 0, at = None))]
    fn decode<'py>(
        &self,
        py: Python<'py>,
        tokens: u64,
        slot: u32,
        at: Option<f64>,
    ) -> PyResult<Option<Bound<'py, PyDict>>> {
        let answer = self.0.lock().decode(slot, tokens, now(at));
        shown(py, answer)
    }

    /// Reports that another conversation is about to replace the tokens of a slot.
    ///
    /// Args:
    ///     tokens: Tokens of the slot in memory now.
    ///     slot: Number of the slot.
    ///     at: Time in seconds since 1970. Default: now.
    ///
    /// Returns:
    ///     The answer, as `prefill`.
    #[pyo3(signature = (tokens, *, slot = 0, at = None))]
    fn switch<'py>(
        &self,
        py: Python<'py>,
        tokens: u64,
        slot: u32,
        at: Option<f64>,
    ) -> PyResult<Option<Bound<'py, PyDict>>> {
        let answer = self.0.lock().switch(slot, tokens, now(at));
        shown(py, answer)
    }

    /// Reports that the engine stops.
    ///
    /// Args:
    ///     tokens: Tokens of the slot in memory now.
    ///     slot: Number of the slot.
    ///     at: Time in seconds since 1970. Default: now.
    ///
    /// Returns:
    ///     The answer, as `prefill`.
    #[pyo3(signature = (tokens, *, slot = 0, at = None))]
    fn shutdown<'py>(
        &self,
        py: Python<'py>,
        tokens: u64,
        slot: u32,
        at: Option<f64>,
    ) -> PyResult<Option<Bound<'py, PyDict>>> {
        let answer = self.0.lock().shutdown(slot, tokens, now(at));
        shown(py, answer)
    }

    /// Reports that a granted save has succeeded.
    ///
    /// Args:
    ///     save: The `save` number of the answer.
    ///     bytes: Bytes that were written.
    ///     at: Time in seconds since 1970. Default: now.
    ///
    /// Raises:
    ///     Error: The save was not granted, or has ended already.
    #[pyo3(signature = (save, bytes, *, at = None))]
    fn saved(&self, py: Python<'_>, save: u64, bytes: u64, at: Option<f64>) -> PyResult<()> {
        let told = self.0.lock().saved(save, bytes, now(at));
        told.map_err(|error| raise(py, error))
    }

    /// Reports that a granted save has failed.
    ///
    /// Args:
    ///     save: The `save` number of the answer.
    ///     bytes: Bytes that were written before the failure.
    ///     at: Time in seconds since 1970. Default: now.
    ///
    /// Raises:
    ///     Error: The save was not granted, or has ended already.
    #[pyo3(signature = (save, bytes = 0, *, at = None))]
    fn failed(&self, py: Python<'_>, save: u64, bytes: u64, at: Option<f64>) -> PyResult<()> {
        let told = self.0.lock().failed(save, bytes, now(at));
        told.map_err(|error| raise(py, error))
    }

    /// Reports that checkpoints of a slot's conversation were deleted or failed verification.
    ///
    /// Args:
    ///     tokens: Leading tokens that are still on disk.
    ///     slot: Number of the slot.
    #[pyo3(signature = (tokens, *, slot = 0))]
    fn lost(&self, tokens: u64, slot: u32) {
        self.0.lock().lost(slot, tokens);
    }

    /// Adds bytes to the write budgets that were written before this policy was created.
    ///
    /// After a restart, report the writes of the last day, for example from a catalogue.
    ///
    /// Args:
    ///     bytes: Bytes that were written.
    ///     at: Time of the write, in seconds since 1970.
    #[pyo3(signature = (bytes, *, at))]
    fn recall(&self, bytes: u64, at: f64) {
        self.0.lock().recall(bytes, now(Some(at)));
    }

    /// Returns the bytes that may be written now.
    ///
    /// Both budgets count, without the bytes of saves in progress.
    ///
    /// Args:
    ///     at: Time in seconds since 1970. Default: now.
    ///
    /// Returns:
    ///     Bytes; None without a budget.
    #[pyo3(signature = (*, at = None))]
    fn bytes_left(&self, at: Option<f64>) -> Option<u64> {
        let mut policy = self.0.lock();
        let settings = policy.settings();
        let is_bound = settings.write_budget_hour.is_some() || settings.write_budget_day.is_some();
        is_bound.then(|| policy.bytes_left(now(at)))
    }

    /// The settings by their names: sizes in bytes, and None for a budget without a limit.
    #[getter]
    fn settings<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let settings = *self.0.lock().settings();
        let said = PyDict::new(py);
        let counts = [
            ("disk_space", settings.disk_space),
            ("min_tokens", settings.min_tokens),
            ("cold_max_tokens", settings.cold_max_tokens),
            (
                "continued_interval_tokens",
                settings.continued_interval_tokens,
            ),
            ("boundary_trim_tokens", settings.boundary_trim_tokens),
            ("boundary_align_tokens", settings.boundary_align_tokens),
            ("token_bytes", settings.token_bytes),
            ("fixed_bytes", settings.fixed_bytes),
        ];
        counts
            .iter()
            .try_for_each(|(name, count)| said.set_item(name, count))?;
        said.set_item("write_budget_hour", settings.write_budget_hour)?;
        said.set_item("write_budget_day", settings.write_budget_day)?;
        said.set_item("prefixes", settings.saves_prefixes)?;
        said.set_item("whole", settings.writes == Writes::Whole)?;
        Ok(said)
    }

    /// Ratio of all bytes written to those of new tokens; None before there are any.
    #[getter]
    fn write_amplification(&self) -> Option<f64> {
        self.0.lock().metrics().write_amplification()
    }
}
