//! Settings as Python gives them, read into the neutral value that the one schema checks.

use std::borrow::Cow;
use std::ffi::OsString;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvdepot_store::config::{read_below, read_beside, size};
use kvdepot_store::{Config, Error};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyMapping, PyString, PyTuple};
use serde_json::{Map, Value};

use crate::{arguments, errors, log};

/// Endings that make a text without a separator a file's name.
const ENDINGS: [&str; 3] = [".yaml", ".yml", ".json"];

/// Deepest nesting that is read: the schema has two levels.
const DEPTH_MAX: usize = 8;

/// What begins the first argument of `open` for a depot that another process serves.
const SERVICE: &str = "unix:";

/// What a process says of a depot that another one serves.
const CLIENTS: [&str; 2] = ["lanes", "timeout"];

/// Returns the bytes of a size such as `64GiB`; None for another text.
#[pyfunction(name = "_size")]
pub(crate) fn bytes(text: &str) -> Option<u64> {
    size::size(text)
}

/// Returns the seconds of a duration such as `500ms`; None for another text.
#[pyfunction(name = "_duration")]
pub(crate) fn seconds(text: &str) -> Option<f64> {
    size::duration(text).map(|duration| duration.as_secs_f64())
}

/// Where a call of `open` finds its depot.
pub(crate) enum Source {
    /// This process opens the tiers.
    Tiers(Box<Config>),
    /// Another process serves them at a socket.
    Service {
        socket: PathBuf,
        lanes: Option<usize>,
        timeout: Option<Duration>,
    },
}

/// The arguments of `open`, read and checked.
pub(crate) fn source(
    pipeline: &Bound<'_, PyAny>,
    settings: Option<&Bound<'_, PyAny>>,
) -> PyResult<Source> {
    let Some(socket) = service(pipeline)? else {
        return Ok(Source::Tiers(Box::new(config(pipeline, settings)?)));
    };
    let py = pipeline.py();
    if socket.is_empty() {
        let allowed = "unix: followed by the path of a socket, such as unix:/run/kvdepot.sock";
        return Err(errors::config(py, "pipeline", SERVICE, allowed));
    }
    let given = match settings {
        None => Value::Null,
        Some(settings) => value("settings", settings, 0)?,
    };
    // The rest is the owner's to say.
    if let Some(name) = given
        .as_object()
        .and_then(|map| map.keys().find(|name| !CLIENTS.contains(&name.as_str())))
    {
        let allowed = "only lanes and timeout in a client; set other options in the server";
        return Err(errors::config(py, "settings", name, allowed));
    }
    let checked = Config::new("Cache", &given).map_err(|error| errors::raise(py, error))?;
    Ok(Source::Service {
        socket: socket.into(),
        lanes: checked.lanes,
        timeout: checked.timeout,
    })
}

/// A text of an option.
fn text(field: &str, given: &Bound<'_, PyString>) -> PyResult<String> {
    let text = given.to_cow().map(Cow::into_owned);
    text.map_err(|_| errors::config(given.py(), field, errors::shown(given), arguments::TEXT))
}

/// The path behind `unix:`, where the first argument is one.
fn service(pipeline: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
    let Ok(given) = pipeline.cast::<PyString>() else {
        return Ok(None);
    };
    Ok(text("pipeline", given)?
        .strip_prefix(SERVICE)
        .map(str::to_owned))
}

/// The path of a socket, that `open` would take with `unix:` before it.
pub(crate) fn bare(socket: PathBuf) -> PathBuf {
    let path = socket.to_str().and_then(|text| text.strip_prefix(SERVICE));
    path.map(PathBuf::from).unwrap_or(socket)
}

/// The configuration of a call of `open`: a pipeline with settings, or a file whose options the
/// settings override.
fn config(pipeline: &Bound<'_, PyAny>, settings: Option<&Bound<'_, PyAny>>) -> PyResult<Config> {
    let py = pipeline.py();
    let given = match settings {
        None => Value::Object(Map::new()),
        Some(settings) => value("settings", settings, 0)?,
    };
    let config = match file(pipeline)? {
        Some(path) if is_socket(&path) => {
            let allowed = format!(
                "unix:{} to connect to the server of this socket",
                path.display()
            );
            return Err(errors::config(py, "pipeline", path.display(), allowed));
        }
        Some(path) => read_below(&path, given).and_then(|all| Config::from_value(&all)),
        None => {
            let Ok(named) = pipeline.cast::<PyString>() else {
                let allowed = "a pipeline such as \"Cache|Dax\", or the path of a YAML file";
                return Err(errors::config(
                    py,
                    "pipeline",
                    errors::shown(pipeline),
                    allowed,
                ));
            };
            Config::new(&text("pipeline", named)?, &given)
        }
    };
    config.map_err(|error| match error {
        Error::Io { path, source } => {
            let allowed = format!("a configuration file that this user can read ({source})");
            errors::config(py, "pipeline", path.display(), allowed)
        }
        other => errors::raise(py, other),
    })
}

/// Returns the directory of this user's caches, and creates it.
///
/// Raises:
///     Error: No such directory can be written.
#[pyfunction]
#[pyo3(name = "_cache_directory")]
pub(crate) fn cache_directory(py: Python<'_>) -> PyResult<OsString> {
    let found = kvdepot_host::dirs::cache_dir();
    let found = found.map_err(|error| errors::raise(py, error.into()))?;
    Ok(found.into_os_string())
}

/// Reads the options of a configuration file.
///
/// Args:
///     path: A configuration file of kvdepot, or of UCM, whose options are translated.
///     beside: Options that override those of the file.
///
/// Returns:
///     The options as JSON, and true for a file of UCM.
///
/// Raises:
///     ConfigError: The file cannot be read, or an option is not allowed.
#[pyfunction]
#[pyo3(name = "_options_of_file", signature = (path, beside = None))]
pub(crate) fn options_of_file(
    py: Python<'_>,
    path: PathBuf,
    beside: Option<&Bound<'_, PyAny>>,
) -> PyResult<(String, bool)> {
    // What becomes of UCM's keys is said there.
    log::start(py)?;
    let beside = match beside {
        None => Value::Null,
        Some(beside) => value("settings", beside, 0)?,
    };
    let read = read_beside(&path, &beside).map_err(|error| errors::raise(py, error))?;
    Ok((read.options.to_string(), read.is_ucms))
}

/// The path, where the first argument is one.
fn file(pipeline: &Bound<'_, PyAny>) -> PyResult<Option<PathBuf>> {
    if let Ok(given) = pipeline.cast::<PyString>() {
        let text = text("pipeline", given)?;
        let named = text.contains('/') || ENDINGS.iter().any(|ending| text.ends_with(ending));
        return Ok(named.then(|| PathBuf::from(&text)));
    }
    Ok(match pipeline.hasattr("__fspath__")? {
        true => Some(pipeline.extract()?),
        false => None,
    })
}

fn is_socket(path: &Path) -> bool {
    path.metadata().is_ok_and(|at| at.file_type().is_socket())
}

/// The value of an option.
pub(crate) fn neutral(field: &str, given: &Bound<'_, PyAny>) -> PyResult<Value> {
    value(field, given, 0)
}

fn value(field: &str, given: &Bound<'_, PyAny>, depth: usize) -> PyResult<Value> {
    let wrong = |allowed| errors::config(given.py(), field, errors::shown(given), allowed);
    let refuse = || wrong("a string, number, bool, path, list or mapping");
    if depth > DEPTH_MAX {
        return Err(refuse());
    }
    if given.is_none() {
        return Ok(Value::Null);
    }
    if let Ok(flag) = given.cast::<PyBool>() {
        return Ok(Value::Bool(flag.is_true()));
    }
    if given.is_instance_of::<PyInt>() {
        let signed = given.extract::<i64>().map(Value::from);
        let number = signed.or_else(|_| given.extract::<u64>().map(Value::from));
        return number.map_err(|_| wrong("a whole number below 2^64"));
    }
    if let Ok(number) = given.cast::<PyFloat>() {
        return serde_json::Number::from_f64(number.value())
            .map(Value::Number)
            .ok_or_else(|| wrong("a finite number"));
    }
    if let Ok(given) = given.cast::<PyString>() {
        return Ok(Value::String(text(field, given)?));
    }
    if let Some(items) = entries(given)? {
        let mut map = Map::new();
        for (name, inner) in items {
            let Ok(name) = name.extract::<String>() else {
                let allowed = "option names that are strings";
                let shown = errors::shown(&name);
                return Err(errors::config(given.py(), field, shown, allowed));
            };
            let inner_field = match field {
                "settings" => name.clone(),
                section => format!("{section}.{name}"),
            };
            map.insert(name, value(&inner_field, &inner, depth + 1)?);
        }
        return Ok(Value::Object(map));
    }
    // A copy: reading an item may run Python code, which may change the list.
    let items = match given.cast::<PyList>() {
        Ok(list) => Some(list.to_tuple()),
        Err(_) => given.cast::<PyTuple>().ok().cloned(),
    };
    if let Some(items) = items {
        let items = items.iter().map(|item| value(field, &item, depth + 1));
        return Ok(Value::Array(items.collect::<PyResult<_>>()?));
    }
    match given.extract::<PathBuf>() {
        Ok(path) => match path.into_os_string().into_string() {
            Ok(text) => Ok(Value::String(text)),
            Err(_) => Err(refuse()),
        },
        Err(_) => Err(refuse()),
    }
}

/// A name and what it stands for.
type Entry<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);

/// The entries of a mapping, which reading one of them cannot change any more.
fn entries<'py>(given: &Bound<'py, PyAny>) -> PyResult<Option<Vec<Entry<'py>>>> {
    if let Ok(dict) = given.cast::<PyDict>() {
        return Ok(Some(dict.iter().collect()));
    }
    let Ok(mapping) = given.cast::<PyMapping>() else {
        return Ok(None);
    };
    let items = mapping.items()?;
    Ok(Some(
        items
            .iter()
            .map(|item| item.extract())
            .collect::<PyResult<_>>()?,
    ))
}

/// A neutral value as Python's.
pub(crate) fn to_python<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Null => py.None().into_bound(py),
        Value::Bool(flag) => PyBool::new(py, *flag).to_owned().into_any(),
        Value::Number(number) => match number.as_u64() {
            Some(number) => number.into_pyobject(py)?.into_any(),
            None => number
                .as_f64()
                .unwrap_or(f64::NAN)
                .into_pyobject(py)?
                .into_any(),
        },
        Value::String(text) => PyString::new(py, text).into_any(),
        Value::Array(items) => {
            let items: Vec<_> = items
                .iter()
                .map(|item| to_python(py, item))
                .collect::<PyResult<_>>()?;
            PyList::new(py, items)?.into_any()
        }
        Value::Object(map) => {
            let dict = PyDict::new(py);
            for (name, inner) in map {
                dict.set_item(name, to_python(py, inner)?)?;
            }
            dict.into_any()
        }
    })
}
