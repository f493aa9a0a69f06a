//! Who carries the bytes of blocks: chosen when the tier is opened.

use std::sync::Arc;
use std::time::Duration;

use kvdepot_arena::Error;
use kvdepot_media::file::{Hands, Manner, UsrbioConfig};

use super::folder::Folder;
use super::options::{DirectIo, Options, Reach, Rings};

/// Reads and writes under way at a time where there is no ring.
const THREADS: usize = 8;

/// Who reads and writes the files, how, and that in words. What takes longer than `patience` fails,
/// where the file system may hang.
pub(super) fn reach(
    options: &Options,
    folder: &Folder,
    patience: Duration,
) -> Result<(Arc<Hands>, Manner, String), Error> {
    Ok(match &options.reach {
        Reach::Rings(rings) => {
            let streams = rings.streams;
            let hands = hands_of(rings, options, patience)?;
            (hands, Manner::CACHED, format!("{streams} rings of 3FS"))
        }
        Reach::Files(direct) => {
            // A disk of this host fails or answers.
            let hands = match folder.is_far() {
                true => Hands::patient(THREADS, patience),
                false => Hands::new(THREADS),
            }?;
            let manner = match (direct, folder.direct()) {
                (DirectIo::Yes, None) => {
                    let field = format!("{}.direct", options.section);
                    let allowed =
                        "auto or false, because the file system does not support direct I/O";
                    return Err(Error::config(field, "true", allowed));
                }
                (DirectIo::Yes | DirectIo::Auto, Some(manner)) => manner,
                (DirectIo::No, _) | (DirectIo::Auto, None) => Manner::CACHED,
            };
            let way = hands.way(manner.is_direct());
            (hands, manner, way)
        }
    })
}

/// The rings of the 3FS that has the directory.
fn hands_of(rings: &Rings, options: &Options, patience: Duration) -> Result<Arc<Hands>, Error> {
    let config = UsrbioConfig {
        library: rings.library.clone(),
        path: options.path.clone(),
        streams: rings.streams,
        running: rings.running,
        waiting: rings.waiting,
        patience,
    };
    Hands::usrbio(&config).map_err(|error| {
        let allowed = format!(
            "the path of 3FS's library, with ds3fs.path below a 3FS mount ({error}); build \
             hf3fs_api_shared from the 3FS sources, or set library: posix to use the mount without \
             the library"
        );
        Error::config("ds3fs.library", rings.library.display(), allowed)
    })
}

/// Most files that are open at a time: they take half of the descriptors that the process may
/// have. Of each that moves through rings 3FS's library has one too.
pub(super) fn files_max(reach: &Reach) -> usize {
    let each = match reach {
        Reach::Files(_) => 1,
        Reach::Rings(_) => 2,
    };
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit
        .current
        .map_or(usize::MAX, |most| (most / 2 / each) as usize)
}

/// Whether others see all of a file only when it is synced: what is in this host's page cache, and
/// on a 3FS how long the file is.
pub(super) fn syncs(far: bool, options: &Options, direct: bool) -> bool {
    far && (!direct || options.is_far)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::option::{Kind, Parsed, Section};

    #[test]
    fn what_others_would_not_see_is_synced() {
        let mut section = Section::default();
        for (name, value) in [("path", "/mnt/kv"), ("library", "posix")] {
            let value = Parsed::new(name, Kind::Text, &json!(value)).unwrap();
            section.set(name, value);
        }
        let of_3fs = Options::ds3fs(&section).unwrap();
        let others = Options::posix(&section).unwrap();
        for (options, far, direct, is_synced) in [
            (&others, false, false, false),
            (&others, false, true, false),
            (&others, true, false, true),
            (&others, true, true, false),
            (&of_3fs, true, false, true),
            (&of_3fs, true, true, true),
        ] {
            let name = options.name;
            assert_eq!(
                syncs(far, options, direct),
                is_synced,
                "{name} {far} {direct}"
            );
        }
    }
}
