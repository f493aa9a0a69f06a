//! Credentials that change while an engine runs.

use std::sync::Arc;

use super::Engine;
use crate::error::Error;
use crate::peer::Secrets;
use crate::tls::{Secured, Tls};

impl Engine {
    /// Replaces the tokens and the TLS files for connections that begin afterwards.
    ///
    /// The engine proves the first of `tokens`, and admits peers that prove any of them. Existing
    /// connections continue.
    ///
    /// # Errors
    /// [`Error::Input`] if a file cannot be used, or if the engine was started with a token or with
    /// TLS and would lose that protection, or the reverse. Then nothing changes.
    pub fn renew(&self, tokens: &[Vec<u8>], tls: Option<&Tls>) -> Result<(), Error> {
        self.check()?;
        let has_token = tokens.iter().any(|token| !token.is_empty());
        if has_token == self.config.token.is_empty() {
            let allowed = "a token, if the engine was started with one; otherwise none";
            return Err(Error::input("token", "changed", allowed));
        }
        if tls.is_some() != self.config.tls.is_some() {
            let allowed = "TLS, if the engine was started with TLS; otherwise none";
            return Err(Error::input("tls_certificate", "changed", allowed));
        }
        let secured = tls.map(Secured::read).transpose()?.map(Arc::new);
        let mut all = self.secured.lock();
        // Those before it end with their last connection.
        all.retain(|one| Arc::strong_count(one) > 1);
        all.extend(secured.clone());
        drop(all);
        self.secrets.store(Arc::new(Secrets::new(tokens, secured)));
        Ok(())
    }
}
