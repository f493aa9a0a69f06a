//! Options of the HTTP server, which shows metrics and the state of a depot.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use kvdepot_arena::Error;
use serde_json::Value;

use crate::option::absolute;

/// Address of an HTTP server.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "a server can listen at each of them"
)]
pub enum HttpAddress {
    /// A loopback address with a port; 0 lets the system select the port.
    Tcp(SocketAddr),
    /// A Unix socket at this path.
    Unix(PathBuf),
}

impl fmt::Display for HttpAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HttpAddress::Tcp(address) => write!(f, "{address}"),
            HttpAddress::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Settings of the HTTP server.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct HttpConfig {
    /// Address; `None`: no HTTP server.
    pub address: Option<HttpAddress>,
    /// File with the tokens that requests for metrics present; `None`: no token is required.
    pub token_file: Option<PathBuf>,
    /// Names of hosts that requests may have in the header `Host`, in addition to loopback names.
    pub hosts: Vec<String>,
}

impl HttpConfig {
    /// Sets the option `name`, with the text of its value.
    pub(super) fn set(&mut self, name: &str, value: &Value, text: &str) -> Result<(), Error> {
        match name {
            "http" => self.address = address(value, text)?,
            "http_token_file" => self.token_file = Some(absolute(text)),
            _ => self.hosts = hosts(value, text)?,
        }
        Ok(())
    }
}

fn address(value: &Value, text: &str) -> Result<Option<HttpAddress>, Error> {
    let refuse = |allowed: &str| Err(Error::config("http", value, allowed));
    match (text, text.strip_prefix("unix:")) {
        ("off", _) => Ok(None),
        (_, Some("")) => refuse("unix: followed by the path of a socket"),
        (_, Some(path)) => Ok(Some(HttpAddress::Unix(absolute(path)))),
        _ => match text.parse::<SocketAddr>() {
            Ok(address) if address.ip().is_loopback() => Ok(Some(HttpAddress::Tcp(address))),
            // Without TLS, tokens and metrics would cross the network in the clear.
            Ok(_) => refuse(
                "a loopback address, such as 127.0.0.1:9410, or unix: followed by the path of a \
                 socket; for other hosts, put a proxy with TLS in front of this address",
            ),
            Err(_) => refuse(
                "off, an IP address with a port, such as 127.0.0.1:9410 or [::1]:0, or unix: \
                 followed by the path of a socket",
            ),
        },
    }
}

fn hosts(value: &Value, text: &str) -> Result<Vec<String>, Error> {
    let is_name = |name: &str| {
        let mut chars = name.chars();
        !name.is_empty() && chars.all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let names: Vec<String> = text.split(',').map(|name| name.trim().to_owned()).collect();
    match names
        .iter()
        .all(|name| is_name(name) || name.parse::<IpAddr>().is_ok())
    {
        true => Ok(names),
        false => Err(Error::config(
            "http_hosts",
            value,
            "names or IP addresses of hosts, without ports, separated by commas",
        )),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::Config;

    fn http(settings: &Value) -> Result<HttpConfig, String> {
        let config = Config::new("Cache", settings);
        config
            .map(|config| config.http)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn an_address_is_of_this_host_or_of_a_socket() {
        let address = |text: &str| http(&json!({ "http": text })).map(|http| http.address);
        assert_eq!(http(&json!({})), Ok(HttpConfig::default()));
        assert_eq!(address("off"), Ok(None));
        for text in [
            "127.0.0.1:9410",
            "127.8.0.1:0",
            "[::1]:0",
            "unix:/run/h.sock",
        ] {
            let found = address(text).unwrap().unwrap();
            assert_eq!(found.to_string(), text);
        }
        for text in [
            "0.0.0.0:9410",
            "[::]:0",
            "192.0.2.7:9410",
            "[2001:db8::1]:1",
        ] {
            let error = address(text).unwrap_err();
            let says = ["http: ", text, "a loopback address", "a proxy with TLS"];
            assert!(says.iter().all(|word| error.contains(word)), "{error}");
        }
        for text in [
            "9410",
            "127.0.0.1",
            "localhost:9410",
            "unix:",
            "/run/h.sock",
        ] {
            let error = address(text).unwrap_err();
            assert!(error.contains("the path of a socket"), "{error}");
        }
    }

    #[test]
    fn hosts_are_names_without_ports() {
        let hosts = |text: &str| http(&json!({ "http_hosts": text })).map(|http| http.hosts);
        let names = ["a.example", "b-1", "192.0.2.7", "2001:db8::1"].map(str::to_owned);
        assert_eq!(
            hosts("a.example, b-1,192.0.2.7, 2001:db8::1"),
            Ok(names.to_vec())
        );
        for text in ["a.example:80", "http://a.example", "a,,b", " ", "ä"] {
            assert!(hosts(text).unwrap_err().contains("without ports"), "{text}");
        }
    }
}
