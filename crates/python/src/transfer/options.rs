//! What an engine is told when it starts.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use kvdepot_store::config::{nearest, size};
use kvdepot_transfer::{Config, Error, Tls};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};
use serde_json::Value;

use super::shared::refusal;
use crate::{errors, settings};

/// All options, `listen` aside.
const NAMES: [&str; 17] = [
    "token",
    "tls_certificate",
    "tls_key",
    "tls_ca",
    "tls_name",
    "allow_unauthenticated",
    "streams",
    "slice_size",
    "tail_merge",
    "watermark",
    "window",
    "local",
    "rdma",
    "checksum",
    "retries",
    "timeout",
    "connections_max",
];

const DEVICES: &str = "a list of device names such as [\"mlx5_0\"], or None: all that are found";

const FILE: &str = "the path of a PEM file, or None";

const NAME: &str = "a DNS name or an IP address, or None: the address that is connected to";

const LISTEN: &str = "an address and a port such as \"127.0.0.1:0\", or None to listen nowhere";

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
    let mut config = Config::default();
    match listen {
        Listen::Default => {}
        Listen::Given(none) if none.is_none() => config.listen = None,
        Listen::Given(text) => {
            let refuse = || errors::config(py, "listen", errors::shown(text), LISTEN);
            let text: String = text.extract().map_err(|_| refuse())?;
            config.listen = Some(py.detach(|| resolve(&text)).ok_or_else(refuse)?);
        }
    }
    let mut tls = Files::default();
    for (name, given) in options.into_iter().flatten() {
        let name: String = name.extract()?;
        if name == "token" {
            config.token = token(&given)?;
            continue;
        }
        let value = settings::neutral(&name, &given)?;
        if !tls.set(py, &name, &value)? {
            set(&mut config, py, &name, &value)?;
        }
    }
    let tls = Tls::of(tls.certificate, tls.key, tls.ca, tls.name);
    config.tls = tls.map_err(|error| not_started(py, error))?;
    Ok(config)
}

/// What is said of TLS, one by one.
#[derive(Default)]
struct Files {
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    ca: Option<PathBuf>,
    name: Option<String>,
}

impl Files {
    /// Whether the option was one of these.
    fn set(&mut self, py: Python<'_>, name: &str, value: &Value) -> PyResult<bool> {
        let text = |allowed: &str| match value {
            Value::Null => Ok(None),
            Value::String(text) if !text.is_empty() => Ok(Some(text.clone())),
            other => Err(errors::config(py, name, other, allowed)),
        };
        let file = || text(FILE).map(|path| path.map(PathBuf::from));
        match name {
            "tls_certificate" => self.certificate = file()?,
            "tls_key" => self.key = file()?,
            "tls_ca" => self.ca = file()?,
            "tls_name" => self.name = text(NAME)?,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// The first address that a text stands for.
pub(super) fn resolve(text: &str) -> Option<SocketAddr> {
    text.to_socket_addrs().ok()?.next()
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
        let allowed = "a text or bytes, at least one, or None";
        errors::config(given.py(), "token", kind, allowed)
    })
}

fn set(config: &mut Config, py: Python<'_>, name: &str, value: &Value) -> PyResult<()> {
    let text = match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let wrong = |allowed: &str| errors::config(py, name, value, allowed);
    let flag = || value.as_bool().ok_or_else(|| wrong("true or false"));
    let bytes = || size::size(&text).ok_or_else(|| wrong(size::SIZE_HELP));
    let count = || {
        let count = text.parse::<u32>();
        count.map_err(|_| wrong("a whole number from 0 below 2^32"))
    };
    match name {
        "allow_unauthenticated" => config.allow_unauthenticated = flag()?,
        "checksum" => config.checksum = flag()?,
        "local" => config.local = flag()?,
        "rdma" => config.rdma = devices(value).ok_or_else(|| wrong(DEVICES))?,
        "streams" => config.streams = count()? as usize,
        "watermark" => config.watermark = count()? as usize,
        "window" => config.window = count()? as usize,
        "connections_max" => config.connections_max = count()? as usize,
        "retries" => config.retries = count()?,
        "slice_size" => config.slice_size = bytes()?,
        "tail_merge" => config.tail_merge = bytes()?,
        "timeout" => {
            let timeout = size::duration(&text);
            config.timeout = timeout.ok_or_else(|| wrong(size::DURATION_HELP))?;
        }
        _ => return Err(unknown(py, name)),
    }
    Ok(())
}

/// The devices that are used; `None` where it is something else.
fn devices(value: &Value) -> Option<Option<Vec<String>>> {
    if value.is_null() {
        return Some(None);
    }
    let names = value.as_array()?.iter();
    let names: Option<Vec<String>> = names.map(|one| one.as_str().map(str::to_owned)).collect();
    names.map(Some)
}

fn unknown(py: Python<'_>, name: &str) -> PyErr {
    let known = || std::iter::once("listen").chain(NAMES);
    let near = nearest(known(), name);
    let near = near.map_or(String::new(), |(near, _)| {
        format!("did you mean {near:?}? ")
    });
    let known: Vec<&str> = known().collect();
    let allowed = format!("{near}known are {}", known.join(", "));
    errors::config(py, name, "an unknown option", allowed)
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
