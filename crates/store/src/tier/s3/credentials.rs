//! Credentials in a file that somebody renews: it is read again when it has changed.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use kvdepot_arena::Error;
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use parking_lot::Mutex;

use crate::option::FileVersion;

#[derive(Debug)]
pub(super) struct FromFile {
    path: PathBuf,
    known: Mutex<(Option<FileVersion>, Arc<AwsCredential>)>,
}

impl FromFile {
    pub(super) fn open(path: &Path) -> Result<FromFile, Error> {
        let version = FileVersion::of(path);
        let known = read(path).map_err(|what| {
            let allowed = "a file with aws_access_key_id = … and aws_secret_access_key = …";
            let value = format!("{} ({what})", path.display());
            Error::config("s3.credentials", value, allowed)
        })?;
        Ok(FromFile {
            path: path.to_owned(),
            known: Mutex::new((version, Arc::new(known))),
        })
    }

    fn current(&self) -> Arc<AwsCredential> {
        let version = FileVersion::of(&self.path);
        let mut known = self.known.lock();
        if version.is_some() && version != known.0 {
            match read(&self.path) {
                Ok(credential) => *known = (version, Arc::new(credential)),
                // It is being written.
                Err(what) => {
                    tracing::warn!(what, path = %self.path.display(),
                        "cannot read the credentials file; using the previous credentials");
                }
            }
        }
        Arc::clone(&known.1)
    }
}

impl CredentialProvider for FromFile {
    type Credential = AwsCredential;

    fn get_credential<'a, 'b>(
        &'a self,
    ) -> Pin<Box<dyn Future<Output = object_store::Result<Arc<AwsCredential>>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async { Ok(self.current()) })
    }
}

fn read(path: &Path) -> Result<AwsCredential, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    parse(&text).map_err(str::to_owned)
}

/// Lines `name = value`, as in AWS's own files; of those with sections the first one that counts
/// has no name or is `default`.
fn parse(text: &str) -> Result<AwsCredential, &'static str> {
    let mut here = true;
    let (mut id, mut secret, mut token) = (None, None, None);
    for line in text.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[') {
            here = section.trim_end_matches(']').trim() == "default";
        }
        let Some((name, value)) = line.split_once('=').filter(|_| here) else {
            continue;
        };
        let value = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
        match name.trim() {
            "aws_access_key_id" => id = value,
            "aws_secret_access_key" => secret = value,
            "aws_session_token" => token = value,
            _ => {}
        }
    }
    Ok(AwsCredential {
        key_id: id.ok_or("no aws_access_key_id")?,
        secret_key: secret.ok_or("no aws_secret_access_key")?,
        token,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_renewed_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("credentials");
        assert!(FromFile::open(&path).is_err());
        let write = |id: &str| {
            let text = format!(
                "[other]\naws_access_key_id = x\n[default]\n# mine\naws_access_key_id = {id}\n\
                 aws_secret_access_key=s=1\n"
            );
            std::fs::write(&path, text).unwrap();
        };
        write("one");
        let file = FromFile::open(&path).unwrap();
        let known = file.current();
        assert_eq!(
            (&*known.key_id, &*known.secret_key, &known.token),
            ("one", "s=1", &None)
        );
        write("second");
        assert_eq!(file.current().key_id, "second");
        std::fs::write(&path, "half").unwrap();
        assert_eq!(file.current().key_id, "second");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(file.current().key_id, "second");
    }
}
