//! Tokens that requests present. Their file is read again after each change.

use std::path::{Path, PathBuf};

use kvdepot_arena::Error;
use kvdepot_host::EachMinute;
use kvdepot_store::option::{FileVersion, read_tokens};
use parking_lot::Mutex;

/// The option that names the file.
const FIELD: &str = "http_token_file";

/// The tokens of a file.
pub(super) struct Tokens {
    path: PathBuf,
    known: Mutex<Known>,
    failures: EachMinute,
}

/// The file as it was read last.
struct Known {
    version: Option<FileVersion>,
    /// Hashes of the tokens: equal ones are compared in constant time.
    hashes: Vec<blake3::Hash>,
}

impl Tokens {
    /// Reads the file at `path`.
    pub(super) fn open(path: &Path) -> Result<Tokens, Error> {
        // First, so that a change during the read is noticed later.
        let version = FileVersion::of(path);
        Ok(Tokens {
            known: Mutex::new(Known {
                version,
                hashes: read(path)?,
            }),
            path: path.to_owned(),
            failures: EachMinute::default(),
        })
    }

    /// Returns true if `presented` is one of the tokens. The duration depends only on the length of
    /// `presented` and on the number of tokens.
    pub(super) fn admit(&self, presented: &[u8]) -> bool {
        let presented = blake3::hash(presented);
        let mut known = self.known.lock();
        let version = FileVersion::of(&self.path);
        if version != known.version {
            match read(&self.path) {
                Ok(hashes) => *known = Known { version, hashes },
                // It may be incomplete until the next request.
                Err(error) => {
                    if let Some(unsaid) = self.failures.may_say() {
                        tracing::warn!(%error, unsaid,
                            "cannot read the HTTP tokens again; the previous tokens stay valid");
                    }
                }
            }
        }
        let mut is_admitted = false;
        for token in &known.hashes {
            is_admitted |= *token == presented;
        }
        is_admitted
    }
}

fn read(path: &Path) -> Result<Vec<blake3::Hash>, Error> {
    let tokens = read_tokens(FIELD, path)?;
    Ok(tokens.iter().map(|token| blake3::hash(token)).collect())
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, rename, set_permissions, write};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// Replaces the file, as tools that rotate secrets do.
    fn store(path: &Path, text: &str, mode: u32) {
        let new = path.with_extension("new");
        write(&new, text).unwrap();
        set_permissions(&new, Permissions::from_mode(mode)).unwrap();
        rename(new, path).unwrap();
    }

    #[test]
    fn tokens_of_the_file_are_admitted_until_it_has_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        store(&path, "old\n", 0o600);
        let tokens = Tokens::open(&path).unwrap();
        assert!(tokens.admit(b"old"));
        for wrong in [&b""[..], b"ol", b"old ", b"Old", b"new"] {
            assert!(!tokens.admit(wrong));
        }
        store(&path, "old\nnew\n", 0o600);
        assert!(tokens.admit(b"old") && tokens.admit(b"new"));
        store(&path, "new\n", 0o600);
        assert!(!tokens.admit(b"old") && tokens.admit(b"new"));
        // A file that cannot be used changes nothing.
        for (text, mode) in [("x\n", 0o644), ("\n", 0o600)] {
            store(&path, text, mode);
            assert!(tokens.admit(b"new") && !tokens.admit(b"x"));
        }
        std::fs::remove_file(&path).unwrap();
        assert!(tokens.admit(b"new"));
        store(&path, "newest\n", 0o600);
        assert!(tokens.admit(b"newest") && !tokens.admit(b"new"));
    }

    #[test]
    fn a_file_that_others_can_read_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        store(&path, "secret\n", 0o640);
        let error = Tokens::open(&path).err().unwrap().to_string();
        assert!(
            error.contains("http_token_file") && error.contains("0600"),
            "{error}"
        );
    }
}
