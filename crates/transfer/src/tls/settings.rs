//! What an engine is told of TLS.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// TLS files of an engine. The engine reads them when it starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::exhaustive_structs, reason = "made from its fields")]
pub struct Tls {
    /// PEM file with the engine's certificate, and the intermediate certificates.
    pub certificate: PathBuf,
    /// PEM file with the key of the certificate.
    pub key: PathBuf,
    /// PEM file with the authorities that must have signed the certificates of peers.
    pub ca: PathBuf,
    /// DNS name or address that certificates of targets must have. With `None` it is the address
    /// used to connect.
    pub name: Option<String>,
}

impl Tls {
    /// Combines the options of these names, which are either all three files or none.
    ///
    /// Returns `None` without files.
    ///
    /// # Errors
    /// [`Error::Input`] for the first missing file, or for a name without files.
    pub fn of(
        certificate: Option<PathBuf>,
        key: Option<PathBuf>,
        ca: Option<PathBuf>,
        name: Option<String>,
    ) -> Result<Option<Tls>, Error> {
        let missing = |field| {
            let allowed = "set tls_certificate, tls_key and tls_ca together, or none of them";
            Err(Error::input(field, "missing", allowed))
        };
        match (certificate, key, ca) {
            (Some(certificate), Some(key), Some(ca)) => Ok(Some(Tls {
                certificate,
                key,
                ca,
                name,
            })),
            (None, None, None) => match name {
                Some(name) => {
                    let allowed = "this option only with tls_certificate, tls_key and tls_ca";
                    Err(Error::input("tls_name", name, allowed))
                }
                None => Ok(None),
            },
            (None, ..) => missing("tls_certificate"),
            (_, None, _) => missing("tls_key"),
            (.., None) => missing("tls_ca"),
        }
    }
}
