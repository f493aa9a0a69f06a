//! What all who share a directory have to name alike, in a file of it.
//!
//! Another `fan_out` would look for blocks in other folders, and leave some of them to nobody: it
//! is refused. Of several capacities the smallest counts, as its process collects first: that is
//! said.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::time::Duration;

use kvdepot_arena::{Error, size};
use kvdepot_host::dir::{Access, Before, Dir};

use super::folder::Folder;
use super::options::FAN_OUT;

/// The file's name.
const NAME: &str = "settings";

/// Its first line.
const KIND: &str = "kvdepot posix 1";

/// More than it ever has.
const LEN_MAX: u64 = 4096;

/// How lately one who shares the directory has said that it is there.
const HERE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Settings {
    capacity: u64,
    fan_out: u32,
}

impl Settings {
    fn text(self) -> String {
        let Settings { capacity, fan_out } = self;
        format!("{KIND}\ncapacity {capacity}\nfan_out {fan_out}\n")
    }

    fn parse(text: &str) -> Option<Settings> {
        let mut lines = text.lines();
        (lines.next()? == KIND).then_some(())?;
        let mut number = |name: &str| lines.next()?.strip_prefix(name)?.parse().ok();
        Some(Settings {
            capacity: number("capacity ")?,
            fan_out: u32::try_from(number("fan_out ")?).ok()?,
        })
    }

    fn read(dir: &Dir) -> Result<Option<Settings>, Error> {
        let mut text = String::new();
        if let Some(fd) = dir.open_at(NAME, Access::Read)? {
            // What is no text is no settings.
            let _read = File::from(fd).take(LEN_MAX).read_to_string(&mut text);
        }
        Ok(Settings::parse(&text))
    }

    fn write(self, dir: &Dir, before: Before) -> Result<bool, Error> {
        let temporary = dir.temporary()?;
        let fd = temporary.as_fd().try_clone_to_owned();
        let written = fd.and_then(|fd| File::from(fd).write_all(self.text().as_bytes()));
        written.map_err(|source| Error::Io {
            path: NAME.into(),
            source,
        })?;
        Ok(temporary.publish(NAME, before)?)
    }
}

/// What is taken of a file system where nobody says how much: hundredths.
const SHARE: u64 = 80;

/// Compares what this process names with what the others do; the capacity that it goes by, which is
/// theirs where it names none. Sets the folder's `fan_out`.
pub(super) fn agree(
    folder: &Folder,
    capacity: Option<u64>,
    fan_out: Option<u32>,
) -> Result<u64, Error> {
    let (dir, path) = (folder.dir(), folder.path.display());
    let mut theirs = Settings::read(&dir)?;
    let fan_out = fan_out.or_else(|| theirs.map(|theirs| theirs.fan_out));
    folder.has_folders(fan_out.unwrap_or(FAN_OUT));
    let named = capacity.or_else(|| theirs.map(|theirs| theirs.capacity));
    let mine = Settings {
        capacity: match named {
            Some(named) => named,
            None => dir.file_system_bytes()? / 100 * SHARE,
        },
        fan_out: folder.folders(),
    };
    if named.is_none() {
        let taken = size::show(mine.capacity);
        tracing::info!(%path, taken, "no capacity configured; using 80 % of the file system");
    }
    if theirs.is_none() {
        // It may be a broken one.
        let before = match dir.has(NAME)? {
            true => Before::Goes,
            false => Before::Stays,
        };
        match mine.write(&dir, before) {
            // Somebody else was first.
            Ok(false) => theirs = Settings::read(&dir)?,
            Ok(true) => {}
            Err(error) => {
                tracing::debug!(%error, %path, "cannot write the settings of the directory")
            }
        }
    }
    // Who was first has named it for those who do not.
    let mine = Settings {
        capacity: match (capacity, theirs) {
            (None, Some(theirs)) => theirs.capacity,
            _ => mine.capacity,
        },
        ..mine
    };
    let Some(theirs) = theirs.filter(|theirs| *theirs != mine) else {
        return Ok(mine.capacity);
    };
    if theirs.fan_out != mine.fan_out {
        let allowed = format!(
            "{}, the value of the directory {path} (see its file `{NAME}`); all processes that \
             share it must use the same value",
            theirs.fan_out
        );
        return Err(Error::config(
            format!("{}.fan_out", folder.section),
            mine.fan_out,
            allowed,
        ));
    }
    if folder.others_act(HERE)? {
        tracing::warn!(
            %path,
            here = size::show(mine.capacity),
            others = size::show(theirs.capacity),
            "processes configure different capacities for one directory; the smallest value applies"
        );
        return Ok(mine.capacity);
    }
    match mine.write(&dir, Before::Goes) {
        Ok(_) => {
            let (before, now) = (size::show(theirs.capacity), size::show(mine.capacity));
            tracing::info!(%path, before, now, "directory capacity changed");
        }
        Err(error) => tracing::debug!(%error, %path, "cannot write the settings of the directory"),
    }
    Ok(mine.capacity)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_as_they_are_written_and_nothing_else_is() {
        let settings = Settings {
            capacity: 1 << 40,
            fan_out: 256,
        };
        let text = settings.text();
        assert_eq!(Settings::parse(&text), Some(settings));
        assert_eq!(Settings::parse(&text.replace("posix 1", "posix 2")), None);
        assert_eq!(Settings::parse(&text.replace("256", "x")), None);
        assert_eq!(Settings::parse(""), None);
    }
}
