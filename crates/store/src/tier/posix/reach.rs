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
                    let allowed = "auto or false: its file system has no direct I/O";
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
            "3FS's library, and a path below its mount: {error}. Build hf3fs_api_shared of 3FS and \
             name it here; or library: posix, which goes through the mount"
        );
        Error::config("ds3fs.library", rings.library.display(), allowed)
    })
}
