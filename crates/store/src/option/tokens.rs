//! Tokens in a file, one per line.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use kvdepot_arena::Error;

/// Most bytes of a file of tokens.
const LEN_MAX: u64 = 4096;

/// Permissions of other users than the owner, of which a file of tokens has none.
const OTHERS: u32 = 0o077;

/// Reads the tokens in the file at `path`, one per line; `field` is the option that names the file.
///
/// Blanks around a token and empty lines do not count.
///
/// # Errors
///
/// * [`Error::Io`] if the file cannot be read.
/// * [`Error::Config`] if other users may access the file, if it is larger than 4096 bytes, or if
///   it contains no token. The message contains no token.
pub fn read_tokens(field: &str, path: &Path) -> Result<Vec<Vec<u8>>, Error> {
    let io = |source| Error::Io {
        path: format!("{field}: {}", path.display()).into(),
        source,
    };
    let refuse = |allowed: &str| Error::config(field, path.display(), allowed);
    let meta = std::fs::metadata(path).map_err(io)?;
    if meta.permissions().mode() & OTHERS != 0 {
        return Err(refuse(
            "a file that only its owner can read; set its mode to 0600 (chmod 600)",
        ));
    }
    if meta.len() > LEN_MAX {
        return Err(refuse("a file of at most 4096 bytes"));
    }
    let text = std::fs::read(path).map_err(io)?;
    let lines = text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    let tokens: Vec<Vec<u8>> = lines
        .filter(|line| !line.is_empty())
        .map(<[u8]>::to_vec)
        .collect();
    match tokens.is_empty() {
        true => Err(refuse("a file that contains a token")),
        false => Ok(tokens),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions, write};

    use super::*;

    #[test]
    fn tokens_are_the_lines_of_a_file_that_only_its_owner_can_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        let read = |text: &str, mode| {
            write(&path, text).unwrap();
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            read_tokens("field", &path).map_err(|error| error.to_string())
        };
        assert_eq!(
            read(" old\r\n\n\tnew", 0o600),
            Ok(vec![b"old".to_vec(), b"new".to_vec()])
        );
        for (text, mode, says) in [
            ("secret", 0o640, "0600"),
            ("secret", 0o604, "0600"),
            (" \n\n", 0o600, "contains a token"),
            (&"secret\n".repeat(1000), 0o600, "at most 4096 bytes"),
        ] {
            let error = read(text, mode).unwrap_err();
            assert!(
                error.starts_with("field: ") && error.contains(says),
                "{error}"
            );
            assert!(!error.contains("secret"), "{error}");
        }
        let none = read_tokens("field", &dir.path().join("none")).unwrap_err();
        assert!(none.to_string().contains("none"), "{none}");
    }
}
