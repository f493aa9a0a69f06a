//! What an engine is told of TLS.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// What an engine proves itself by, and whom it believes. The files are read when it starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::exhaustive_structs, reason = "made from its fields")]
pub struct Tls {
    /// A PEM file: the engine's certificate, and those between it and the authority.
    pub certificate: PathBuf,
    /// A PEM file: the certificate's key.
    pub key: PathBuf,
    /// A PEM file: the authorities that peers' certificates must be signed by.
    pub ca: PathBuf,
    /// A DNS name or an address that certificates of targets must be for; `None`: the address
    /// that is connected to.
    pub name: Option<String>,
}

impl Tls {
    /// What settings of these names stand for: all three files, or none.
    ///
    /// # Errors
    /// [`Error::Input`] for the first that is missing, or for a name without files.
    pub fn of(
        certificate: Option<PathBuf>,
        key: Option<PathBuf>,
        ca: Option<PathBuf>,
        name: Option<String>,
    ) -> Result<Option<Tls>, Error> {
        let missing = |field| {
            let allowed = "tls_certificate, tls_key and tls_ca together, or none of them";
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
                    let allowed = "none without tls_certificate, tls_key and tls_ca";
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
