//! What the namespaces of a directory are.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;

use kvdepot_arena::{Error, NamespaceId};
use kvdepot_host::dir::{Access, Before, Dir};

use super::name::namespace_of;
use crate::tier::description::{FOLDER, LEN_MAX, MOST, decode};
use crate::tier::late::Progress;

/// Writes an encoded description where there is none.
pub(super) fn describe(dir: &Dir, id: NamespaceId, text: &str) -> Result<(), Error> {
    let (folder, name) = (dir.make_folder(FOLDER)?, id.to_string());
    if folder.has(&name)? || folder.names()?.len() >= MOST {
        return Ok(());
    }
    let temporary = folder.temporary()?;
    let fd = temporary.as_fd().try_clone_to_owned();
    let written = fd.and_then(|fd| File::from(fd).write_all(text.as_bytes()));
    written.map_err(|source| Error::Io {
        path: FOLDER.into(),
        source,
    })?;
    temporary.publish(&name, Before::Stays)?;
    Ok(())
}

/// All of them, but those that cannot be read.
pub(super) fn descriptions(
    dir: &Dir,
    progress: &Progress,
) -> Result<Vec<(NamespaceId, String)>, Error> {
    let Some(folder) = dir.folder(FOLDER)? else {
        return Ok(Vec::new());
    };
    let each = folder.names()?.into_iter().take(MOST);
    let read = |name: String| {
        let described = Some((namespace_of(&name)?, read(&folder, &name)?));
        progress.made();
        described
    };
    Ok(each.filter_map(read).collect())
}

fn read(folder: &Dir, name: &str) -> Option<String> {
    let file = File::from(folder.open_at(name, Access::Read).ok()??);
    let mut text = String::new();
    let read = file.take(LEN_MAX as u64).read_to_string(&mut text);
    read.ok().and_then(|_| decode(&text))
}
