//! Which etcd, and how.

use std::time::Duration;

use super::super::error::Error;
use crate::homes::Host;

/// Connection to an etcd.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// Client addresses of etcd's members, for example `http://10.0.0.1:2379`.
    pub endpoints: Vec<String>,
    /// Prefix of the keys of this cluster, 1 to 1024 bytes. Default: `/kvdepot`.
    pub prefix: String,
    /// Lifetime of a host's registration without a heartbeat, in whole seconds, 2 to 3600. etcd may
    /// use a longer time if its own election takes longer. Default: 10 s.
    pub ttl: Duration,
}

impl Settings {
    /// Creates settings with these endpoints, and defaults for all others.
    #[must_use]
    pub fn new(endpoints: Vec<String>) -> Settings {
        Settings {
            endpoints,
            prefix: "/kvdepot".to_owned(),
            ttl: Duration::from_secs(10),
        }
    }

    /// Refuses what is not allowed.
    pub(super) fn check(&self) -> Result<(), Error> {
        if self.endpoints.is_empty() {
            return Err(Error::setting("endpoints", "", "one or more addresses"));
        }
        for endpoint in &self.endpoints {
            let allowed = "http://HOST:PORT, without a path";
            let rest = endpoint.strip_prefix("http://");
            let rest = rest.map(|rest| rest.strip_suffix('/').unwrap_or(rest));
            let plain = |rest: &str| !rest.is_empty() && !rest.contains(['/', '?', '#', '@']);
            if !rest.is_some_and(plain) {
                // One with a user may have a password in it.
                let shown = match endpoint.contains(['@', '?']) {
                    true => "(not shown)",
                    false => endpoint.as_str(),
                };
                return Err(Error::setting("endpoints", shown, allowed));
            }
        }
        let prefix = self.prefix.trim_end_matches('/');
        if prefix.is_empty() || prefix.len() > 1024 {
            let allowed = "1 to 1024 bytes, not counting slashes at the end";
            return Err(Error::setting("prefix", &self.prefix, allowed));
        }
        if self.ttl.subsec_nanos() > 0 || !(2..=3600).contains(&self.ttl.as_secs()) {
            let value = format!("{:?}", self.ttl);
            return Err(Error::setting("ttl", &value, "whole seconds, 2 to 3600"));
        }
        Ok(())
    }

    /// How long one request may take: so short that another endpoint can be asked before the lease
    /// has run out, and not so short that an etcd whose disk is busy counts as dead.
    pub(super) fn patience(&self) -> Duration {
        (self.ttl / 3).clamp(Duration::from_secs(1), Duration::from_secs(3))
    }
}

/// Refuses a host that cannot have a key.
pub(super) fn check_own(own: &Host) -> Result<(), Error> {
    let allowed = "1 to 255 bytes without slashes";
    match own.name.is_empty() || own.name.len() > 255 || own.name.contains('/') {
        true => Err(Error::setting("own.name", &own.name, allowed)),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_work_is_refused() {
        let with = |endpoint: &str| Settings::new(vec![endpoint.to_owned()]).check();
        assert!(with("http://etcd:2379").is_ok() && with("http://[::1]:2379/").is_ok());
        for wrong in [
            "",
            "etcd:2379",
            "https://etcd:2379",
            "http://",
            "http://a/v3",
        ] {
            let error = with(wrong).unwrap_err().to_string();
            assert!(error.starts_with("endpoints: "), "{error}");
        }
        let error = with("http://me:hunter2@etcd:2379").unwrap_err().to_string();
        assert!(error.contains("(not shown)"), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
        let mut settings = Settings::new(vec!["http://a:1".into()]);
        settings.prefix = "/".into();
        assert!(settings.check().is_err());
        settings.prefix = "/a/".into();
        for (millis, fine) in [
            (1000, false),
            (2000, true),
            (2500, false),
            (7_200_000, false),
        ] {
            settings.ttl = Duration::from_millis(millis);
            assert_eq!(settings.check().is_ok(), fine, "{millis}");
        }
        assert!(Settings::new(Vec::new()).check().is_err());
    }
}
