//! An engine's options by their names, as programs in other languages give them.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use kvdepot_store::{config::nearest, size};
use serde_json::Value;

use crate::config::Config;
use crate::error::Error;
use crate::tls::Tls;

/// All options.
const NAMES: [&str; 18] = [
    "listen",
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

const LISTEN: &str = "an address and a port, such as \"127.0.0.1:0\", or none for no listener";

const TOKEN: &str = "text of at least one byte, or none";

const DEVICES: &str = "a list of device names, such as [\"mlx5_0\"], or none for all devices";

const FILE: &str = "the path of a PEM file, or none";

const NAME: &str = "a DNS name or an IP address, or none for the address of the connection";

/// Rejected option.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {value} is not allowed; allowed: {allowed}")]
#[expect(clippy::exhaustive_structs, reason = "bindings take it apart")]
pub struct Refused {
    /// Name of the option.
    pub field: String,
    /// Value of the option. The value of `token` is not shown.
    pub value: String,
    /// Allowed values.
    pub allowed: String,
}

impl Refused {
    fn new(field: &str, value: impl ToString, allowed: impl Into<String>) -> Refused {
        Refused {
            field: field.to_owned(),
            value: value.to_string(),
            allowed: allowed.into(),
        }
    }
}

/// Options of an engine by their names, for example for programs in other languages.
///
/// # Examples
/// ```
/// use kvdepot_transfer::{Engine, Settings};
///
/// let mut settings = Settings::default();
/// settings.set("streams", &4.into())?;
/// settings.set("slice_size", &"1MiB".into())?;
/// settings.set("token", &"a shared secret".into())?;
/// let engine = Engine::start(settings.config()?)?;
/// assert!(engine.address().is_some());
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct Settings {
    config: Config,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    ca: Option<PathBuf>,
    name: Option<String>,
}

impl Settings {
    /// Sets the address for connections from peers. With `None` peers cannot connect.
    pub fn listen(&mut self, at: Option<SocketAddr>) {
        self.config.listen = at;
    }

    /// Sets the secret that both sides must have; empty for none.
    pub fn token(&mut self, token: Vec<u8>) {
        self.config.token = token;
    }

    /// Sets the option `name` to `value`.
    ///
    /// Sizes and durations are texts (`1MiB`, `5s`), `rdma` is a list of names, and flags are
    /// booleans. Numbers may be texts. Null stands for no value, if the option allows that.
    ///
    /// # Errors
    /// [`Refused`] if there is no such option, or if the value is not allowed. The error does not
    /// show a token.
    pub fn set(&mut self, name: &str, value: &Value) -> Result<(), Refused> {
        let text = |allowed: &str| match value {
            Value::Null => Ok(None),
            Value::String(text) if !text.is_empty() => Ok(Some(text.clone())),
            other => Err(Refused::new(name, other, allowed)),
        };
        let file = || text(FILE).map(|path| path.map(PathBuf::from));
        match name {
            "listen" => {
                let wrong = || Refused::new(name, value, LISTEN);
                let at = text(LISTEN)?.map(|text| resolve(&text).ok_or_else(wrong));
                self.listen(at.transpose()?);
            }
            "token" => {
                let hidden = |_| Refused::new(name, "(not shown)", TOKEN);
                let token = text(TOKEN).map_err(hidden)?;
                self.token(token.unwrap_or_default().into_bytes());
            }
            "tls_certificate" => self.certificate = file()?,
            "tls_key" => self.key = file()?,
            "tls_ca" => self.ca = file()?,
            "tls_name" => self.name = text(NAME)?,
            _ => return set(&mut self.config, name, value),
        }
        Ok(())
    }

    /// Returns the configuration with these options.
    ///
    /// # Errors
    /// [`Error::Input`] if some of the TLS options are missing.
    pub fn config(self) -> Result<Config, Error> {
        let tls = Tls::of(self.certificate, self.key, self.ca, self.name)?;
        Ok(Config { tls, ..self.config })
    }
}

/// Returns the first address that a text such as `10.0.0.1:7000` stands for, or `None`. Host names
/// are resolved.
#[must_use]
pub fn resolve(text: &str) -> Option<SocketAddr> {
    text.to_socket_addrs().ok()?.next()
}

fn set(config: &mut Config, name: &str, value: &Value) -> Result<(), Refused> {
    let text = match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let wrong = |allowed: &str| Refused::new(name, value, allowed);
    let flag = || value.as_bool().ok_or_else(|| wrong("true or false"));
    let bytes = || size::size(&text).ok_or_else(|| wrong(size::SIZE_HELP));
    let count = || {
        let count = text.parse::<u32>();
        count.map_err(|_| wrong("a whole number, 0 to 2^32 - 1"))
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
        _ => return Err(unknown(name)),
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

fn unknown(name: &str) -> Refused {
    let near = nearest(NAMES.into_iter(), name);
    let near = near.map_or(String::new(), |(near, _)| {
        format!("; did you mean {near:?}?")
    });
    let allowed = format!("one of {}{near}", NAMES.join(", "));
    Refused::new(name, "an unknown option", allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_is_refused_by_its_name() {
        let mut settings = Settings::default();
        let mut refused = |name: &str, value: Value| settings.set(name, &value).unwrap_err();
        assert!(refused("steams", 2.into()).allowed.contains("\"streams\""));
        assert_eq!(refused("streams", "many".into()).field, "streams");
        assert_eq!(refused("checksum", "yes".into()).value, "\"yes\"");
        assert_eq!(refused("rdma", "mlx5_0".into()).allowed, DEVICES);
        assert_eq!(refused("listen", "nowhere".into()).allowed, LISTEN);
        assert!(!refused("token", 4711.into()).to_string().contains("4711"));
    }

    #[test]
    fn what_was_given_is_in_the_configuration() {
        let mut settings = Settings::default();
        settings.set("listen", &Value::Null).unwrap();
        settings.set("token", &"secret".into()).unwrap();
        settings.set("slice_size", &"1MiB".into()).unwrap();
        settings.set("streams", &"3".into()).unwrap();
        settings.set("timeout", &"250ms".into()).unwrap();
        settings.set("rdma", &Value::Array(Vec::new())).unwrap();
        let config = settings.config().unwrap();
        assert_eq!(config.listen, None);
        assert_eq!(config.token, b"secret");
        assert_eq!((config.slice_size, config.streams), (1 << 20, 3));
        assert_eq!(config.timeout.as_millis(), 250);
        assert_eq!(config.rdma, Some(Vec::new()));
        let mut half = Settings::default();
        half.set("tls_ca", &"ca.pem".into()).unwrap();
        assert!(half.config().is_err());
    }
}
