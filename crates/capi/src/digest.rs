//! Digests of files, for example of a model's weights.

use std::ffi::c_char;
use std::fs::File;
use std::path::Path;

use kvdepot_store::Error;

use crate::given::{Out, Text};

/// Size of a digest in bytes: 64 hexadecimal digits and a zero byte.
pub const DIGEST_LEN: usize = 65;

/// Returns the BLAKE3 digest of a whole file.
fn digest(path: &Path) -> Result<blake3::Hash, Error> {
    let io = |source| Error::Io {
        path: path.into(),
        source,
    };
    let mut hasher = blake3::Hasher::new();
    let file = File::open(path).map_err(io)?;
    hasher.update_reader(file).map_err(io)?;
    Ok(hasher.finalize())
}

exported! {
    /// Implements `kvd_file_digest`.
    fn kvd_file_digest(path: Text, digits: Out<c_char>) {
        digits.place("digest")?;
        let hash = digest(Path::new(path.read("path")?))?;
        let mut said = [0; DIGEST_LEN];
        for (to, from) in said.iter_mut().zip(hash.to_hex().bytes()) {
            *to = from as c_char;
        }
        digits.fill("digest", DIGEST_LEN, &said)
    }
}
