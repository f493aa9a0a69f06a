//! What an engine is told when it starts.

use kvdepot_transfer::{Config, Error, Refused, Settings, resolve};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use super::shared::refusal;
use crate::{errors, settings};

const LISTEN: &str = "an address and a port, such as \"127.0.0.1:0\", or None for no listener";

/// What peers connect to.
pub(super) enum Listen<'py> {
    /// Nothing was said: any port of this host alone.
    Default,
    Given(Bound<'py, PyAny>),
}

impl<'a, 'py> FromPyObject<'a, 'py> for Listen<'py> {
    type Error = PyErr;

    fn extract(given: Borrowed<'a, 'py, PyAny>) -> PyResult<Listen<'py>> {
        Ok(Listen::Given(given.to_owned()))
    }
}

/// The configuration that options stand for.
pub(super) fn config(
    py: Python<'_>,
    listen: &Listen<'_>,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<Config> {
    let mut all = Settings::default();
    match listen {
        Listen::Default => {}
        Listen::Given(none) if none.is_none() => all.listen(None),
        Listen::Given(text) => {
            let refuse = || errors::config(py, "listen", errors::shown(text), LISTEN);
            let text: String = text.extract().map_err(|_| refuse())?;
            all.listen(Some(py.detach(|| resolve(&text)).ok_or_else(refuse)?));
        }
    }
    for (name, given) in options.into_iter().flatten() {
        let name: String = name.extract()?;
        if name == "token" {
            all.token(token(&given)?);
            continue;
        }
        let value = settings::neutral(&name, &given)?;
        all.set(&name, &value).map_err(|refused| {
            let Refused {
                field,
                value,
                allowed,
            } = refused;
            errors::config(py, field, value, allowed)
        })?;
    }
    all.config().map_err(|error| not_started(py, error))
}

/// What both sides have to know. It is not shown where it is wrong.
fn token(given: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    if given.is_none() {
        return Ok(Vec::new());
    }
    let read = match given.cast::<PyString>() {
        Ok(text) => text.to_cow().ok().map(|text| text.as_bytes().to_vec()),
        Err(_) => given
            .cast::<PyBytes>()
            .ok()
            .map(|one| one.as_bytes().to_vec()),
    };
    read.filter(|token| !token.is_empty()).ok_or_else(|| {
        let kind = format!("of type {}", errors::kind(given));
        let allowed = "a string or bytes, at least one byte long, or None";
        errors::config(given.py(), "token", kind, allowed)
    })
}

/// The exception for an engine that cannot be started: what is wrong then is an option.
pub(super) fn not_started(py: Python<'_>, error: Error) -> PyErr {
    match error {
        Error::Input {
            field,
            value,
            allowed,
        } => errors::config(py, field, value, allowed),
        other => refusal(py, other),
    }
}
