//! The keys of a depot: one for each salt, by which blocks are authenticated on media that others
//! can write.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use kvdepot_arena::{Error, NamespaceId};
use kvdepot_media::MacKey;
use parking_lot::RwLock;

/// In the place of a salt: for namespaces without one.
const NO_SALT: &str = "-";

/// Most bytes of a file of keys.
const LEN_MAX: u64 = 1 << 20;

/// Who is allowed what that must not be: anything of others than the user.
const OTHERS: u32 = 0o077;

/// Keys that authenticate blocks on media that other processes can write: one secret per salt.
///
/// Each namespace has a key of its own, which is derived from the secret of its salt and from its
/// digest.
///
/// # Examples
///
/// ```
/// use std::fs::{Permissions, set_permissions, write};
/// use std::os::unix::fs::PermissionsExt;
///
/// use kvdepot_store::{Keyring, NamespaceId};
///
/// let dir = tempfile::tempdir()?;
/// let path = dir.path().join("keys");
/// write(&path, format!("- {}\ntenant-a {}\n", "1".repeat(64), "2".repeat(64)))?;
/// set_permissions(&path, Permissions::from_mode(0o600))?;
///
/// let keys = Keyring::read(&path)?;
/// let id = NamespaceId([7; 16]);
/// assert_eq!(keys.candidates(id).len(), 2);
/// // `Depot::namespace` registers a namespace with its salt.
/// assert!(keys.of(id).is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Keyring {
    secrets: HashMap<String, Secret>,
    known: RwLock<HashMap<NamespaceId, Arc<MacKey>>>,
}

/// 32 bytes that are not shown.
struct Secret([u8; 32]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Keyring {
    /// Reads a key file.
    ///
    /// Each line has a salt, a space and 64 hexadecimal digits. The salt `-` stands for namespaces
    /// without a salt. Empty lines and lines that begin with `#` are ignored.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] of `mac_key_file` in each of these cases. The message contains no key.
    ///
    /// * The file cannot be read, or has no key.
    /// * Its mode gives the group or other users access.
    /// * A line is malformed, or repeats a salt.
    pub fn read(path: &Path) -> Result<Keyring, Error> {
        let refuse = |allowed: String| Error::config("mac_key_file", path.display(), allowed);
        let io = |error: std::io::Error| {
            refuse(format!(
                "a file that this user can read; opening it failed: {error}"
            ))
        };
        let file = File::open(path).map_err(io)?;
        let seen = file.metadata().map_err(io)?;
        if seen.mode() & OTHERS != 0 {
            let mode = seen.mode() & 0o777;
            return Err(refuse(format!(
                "a file that only its owner can read; its mode is {mode:04o}, set it to 0600 \
                 (chmod 600)"
            )));
        }
        let mut text = String::new();
        file.take(LEN_MAX).read_to_string(&mut text).map_err(io)?;
        let mut secrets = HashMap::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim_end();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let parsed = line.rsplit_once(' ');
            let parsed = parsed.and_then(|(salt, key)| Some((salt.trim(), secret(key)?)));
            let Some((salt, secret)) = parsed.filter(|(salt, _)| !salt.is_empty()) else {
                return Err(refuse(format!(
                    "lines with a salt (or -) and 64 hexadecimal digits; line {number} is not valid"
                )));
            };
            if secrets.insert(salt.to_owned(), secret).is_some() {
                return Err(refuse(format!(
                    "one key per salt; line {number} repeats a salt"
                )));
            }
        }
        match secrets.is_empty() {
            true => Err(refuse("a file with at least one key".into())),
            false => Ok(Keyring {
                secrets,
                known: RwLock::default(),
            }),
        }
    }

    /// A namespace of this salt is used from now on.
    ///
    /// # Errors
    /// [`Error::Input`] where its salt has no key.
    pub(crate) fn name(&self, id: NamespaceId, salt: Option<&str>) -> Result<(), Error> {
        let secret = self.secrets.get(salt.unwrap_or(NO_SALT)).ok_or_else(|| {
            let (given, allowed) = match salt {
                Some(_) => ("(not shown)", "a salt with a key in mac_key_file"),
                None => (
                    "none",
                    "a salt with a key in mac_key_file (a line that begins with - is the key for \
                     namespaces without a salt)",
                ),
            };
            Error::input("salt", given, allowed)
        })?;
        let key = || Arc::new(MacKey::derive(&secret.0, &id.0));
        self.known.write().entry(id).or_insert_with(key);
        Ok(())
    }

    /// Returns every key that namespace `id` can have: one per salt in the file.
    ///
    /// Callers that know only the digest of a namespace use it.
    #[must_use]
    pub fn candidates(&self, id: NamespaceId) -> Vec<Arc<MacKey>> {
        let each = self.secrets.values();
        each.map(|secret| Arc::new(MacKey::derive(&secret.0, &id.0)))
            .collect()
    }

    /// Returns the key of namespace `id`, or `None` if no call has registered the namespace.
    #[must_use]
    pub fn of(&self, id: NamespaceId) -> Option<Arc<MacKey>> {
        self.known.read().get(&id).map(Arc::clone)
    }
}

fn secret(text: &str) -> Option<Secret> {
    let digits = text.as_bytes();
    let mut bytes = [0; 32];
    if digits.len() != 2 * bytes.len() {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let digit = |at: usize| char::from(pair[at]).to_digit(16);
        *byte = (digit(0)? << 4 | digit(1)?) as u8;
    }
    Some(Secret(bytes))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn read(text: &str, mode: u32) -> Result<Keyring, Error> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        Keyring::read(&path)
    }

    fn key(digit: &str) -> String {
        digit.repeat(64)
    }

    #[test]
    fn a_salt_has_its_key_and_a_namespace_one_of_its_own() {
        let text = format!("# keys\n- {}\n\nour tenant {}\n", key("1"), key("A"));
        let keys = read(&text, 0o600).unwrap();
        let [one, other, third] = [1, 2, 3].map(|byte| NamespaceId([byte; 16]));
        assert!(keys.of(one).is_none());
        keys.name(one, None).unwrap();
        keys.name(other, None).unwrap();
        keys.name(third, Some("our tenant")).unwrap();
        let of = |id| keys.of(id).unwrap();
        assert_ne!(of(one), of(other));
        assert_eq!(*of(third), MacKey::derive(&[0xAA; 32], &third.0));
        let refused = keys.name(one, Some("secret")).unwrap_err().to_string();
        assert!(
            refused.contains("salt") && !refused.contains("secret"),
            "{refused}"
        );
    }

    #[test]
    fn what_is_no_file_of_keys_is_refused_and_no_key_shown() {
        let (good, short) = (key("1"), "7".repeat(63));
        for (text, mode, why) in [
            (format!("- {good}"), 0o640, "0640"),
            (format!("- {good}"), 0o604, "0604"),
            (String::new(), 0o600, "a file with at least one key"),
            (format!("- {short}"), 0o600, "line 1 is not valid"),
            (
                format!("- {good}\na {short}g"),
                0o600,
                "line 2 is not valid",
            ),
            (good.clone(), 0o600, "line 1 is not valid"),
            (format!("a {good}\na {good}"), 0o600, "line 2 repeats"),
        ] {
            let refused = read(&text, mode).unwrap_err().to_string();
            let shows = refused.contains(&good) || refused.contains(&short);
            assert!(refused.contains(why) && !shows, "{refused}");
        }
        let none = Keyring::read(Path::new("/nowhere/keys")).unwrap_err();
        assert!(none.to_string().contains("mac_key_file"), "{none}");
    }
}
