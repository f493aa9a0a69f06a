//! The exceptions: one class a kind of error, so that a caller can catch what it can mend.

use kvdepot_store::Error;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyModule, PyTuple, PyType};

/// The classes, made when the module is.
struct Classes {
    error: Py<PyType>,
    config: Py<PyType>,
    input: Py<PyType>,
    locked: Py<PyType>,
    full: Py<PyType>,
    corrupt: Py<PyType>,
    closed: Py<PyType>,
    timeout: Py<PyType>,
}

static CLASSES: PyOnceLock<Classes> = PyOnceLock::new();

/// Longest text of a value in a message.
const SHOWN_MAX: usize = 80;

fn classes(py: Python<'_>) -> PyResult<&Classes> {
    CLASSES.get_or_try_init(py, || {
        let exception = py.get_type::<pyo3::exceptions::PyException>();
        let value = py.get_type::<pyo3::exceptions::PyValueError>();
        let late = py.get_type::<pyo3::exceptions::PyTimeoutError>();
        let make = |name: &str, doc: &str, bases: &[&Bound<'_, PyType>]| {
            let body = PyDict::new(py);
            body.set_item("__module__", "kvdepot")?;
            body.set_item("__doc__", doc)?;
            let bases = PyTuple::new(py, bases)?;
            let class = py.get_type::<PyType>().call1((name, bases, body))?;
            Ok::<_, PyErr>(class.cast_into::<PyType>()?.unbind())
        };
        let error = make(
            "Error",
            "Base class of all errors that kvdepot raises.",
            &[&exception],
        )?;
        let base = error.bind(py);
        Ok(Classes {
            config: make(
                "ConfigError",
                "An option that does not exist, or a value that the option does not accept.",
                &[base, &value],
            )?,
            input: make(
                "InputError",
                "A wrong argument. No byte was copied.",
                &[base, &value],
            )?,
            locked: make(
                "LockedError",
                "Another process, or another depot of this process, owns the arena.\n\n\
                 `path` is the arena; `pid` and `host` identify the process that owns it.",
                &[base],
            )?,
            full: make(
                "FullError",
                "A strict reservation failed for lack of space.",
                &[base],
            )?,
            corrupt: make(
                "CorruptError",
                "The medium does not contain a sound arena.",
                &[base],
            )?,
            closed: make(
                "ClosedError",
                "The depot was closed, or belongs to the process that this one was forked from.",
                &[base],
            )?,
            timeout: make(
                "TimeoutError",
                "A wait timed out. The operation itself continues.",
                &[base, &late],
            )?,
            error,
        })
    })
}

/// Puts the classes into the module.
pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let classes = classes(py)?;
    for class in [
        &classes.error,
        &classes.config,
        &classes.input,
        &classes.locked,
        &classes.full,
        &classes.corrupt,
        &classes.closed,
        &classes.timeout,
    ] {
        let class = class.bind(py);
        module.add(class.name()?, class)?;
    }
    Ok(())
}

/// The exception for an error of the store.
pub(crate) fn raise(py: Python<'_>, error: Error) -> PyErr {
    exception(py, error).unwrap_or_else(|while_making| while_making)
}

fn exception(py: Python<'_>, error: Error) -> PyResult<PyErr> {
    let classes = classes(py)?;
    let class = match &error {
        Error::Config { .. } => &classes.config,
        Error::Input { .. } => &classes.input,
        Error::Locked { .. } => &classes.locked,
        Error::Full { .. } => &classes.full,
        Error::Corrupt { .. } => &classes.corrupt,
        Error::Closed(_) => &classes.closed,
        Error::Timeout { .. } | Error::Busy { .. } => &classes.timeout,
        _ => &classes.error,
    };
    let value = class.bind(py).call1((error.to_string(),))?;
    if let Error::Locked {
        path, pid, host, ..
    } = error
    {
        value.setattr("pid", pid)?;
        value.setattr("host", host)?;
        value.setattr("path", path.to_string_lossy())?;
    }
    Ok(PyErr::from_value(value))
}

/// What no other class is for.
pub(crate) fn other(py: Python<'_>, text: String) -> PyErr {
    let made = classes(py).and_then(|classes| classes.error.bind(py).call1((text,)));
    made.map_or_else(|while_making| while_making, PyErr::from_value)
}

/// An argument that is not allowed.
pub(crate) fn input(
    py: Python<'_>,
    field: impl Into<String>,
    value: impl ToString,
    allowed: impl Into<String>,
) -> PyErr {
    let (field, value, allowed) = (field.into(), value.to_string(), allowed.into());
    raise(
        py,
        Error::Input {
            field,
            value,
            allowed,
        },
    )
}

/// A rejected argument, for a caller that holds the interpreter lock.
pub(crate) struct Refused {
    pub(crate) field: String,
    pub(crate) value: String,
    pub(crate) allowed: &'static str,
}

impl Refused {
    pub(crate) fn raise(self, py: Python<'_>) -> PyErr {
        input(py, self.field, self.value, self.allowed)
    }
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Refused {
            field,
            value,
            allowed,
        } = self;
        write!(f, "{field}: {value} is not allowed; allowed: {allowed}")
    }
}

/// An option that is not allowed.
pub(crate) fn config(
    py: Python<'_>,
    field: impl Into<String>,
    value: impl ToString,
    allowed: impl Into<String>,
) -> PyErr {
    let (field, value, allowed) = (field.into(), value.to_string(), allowed.into());
    raise(
        py,
        Error::Config {
            field,
            value,
            allowed,
        },
    )
}

/// A value as a message shows it.
pub(crate) fn shown(value: &Bound<'_, PyAny>) -> String {
    let text = match value.repr() {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(_) => format!("{} object", kind(value)),
    };
    match text.char_indices().nth(SHOWN_MAX) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

/// The name of a value's type.
pub(crate) fn kind(value: &Bound<'_, PyAny>) -> String {
    value
        .get_type()
        .name()
        .map_or_else(|_| "an object".into(), |name| name.to_string())
}
