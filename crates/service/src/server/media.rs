//! What a process gets when it attaches, so that its lanes reach the bytes.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use kvdepot_arena::{Arena, Error};
use kvdepot_host::fds;
use kvdepot_host::fork::LentFd;
use kvdepot_store::{Core, Directory, DoorKey};

use crate::frame::hello::{Kind, Medium, Role};

/// A medium with its descriptor.
type Offered = (Medium, LentFd);

/// All that there is of a depot now; for who is trusted what it shares with other hosts, too.
pub(super) fn offered(core: &Core, role: Role, is_trusted: bool) -> Result<Vec<Offered>, Error> {
    let arenas = core.media().into_iter().map(|one| arena(&one, role));
    let apart = core.arenas_apart().into_iter().filter(|_| is_trusted);
    let apart = apart.map(|one| shown(&one));
    let directories = core.directories().into_iter().map(directory);
    let doors = core.doors().into_iter().filter(|_| is_trusted).map(door);
    arenas
        .chain(apart)
        .chain(directories)
        .chain(doors)
        .collect()
}

fn arena(arena: &Arena, role: Role) -> Result<Offered, Error> {
    let (descriptor, held) = arena.descriptor(role.writes())?;
    let medium = Medium {
        number: arena.number(),
        kind: match arena.mapping() {
            Ok(_) => Kind::Mapped,
            Err(_) => Kind::Called,
        },
        len: arena.medium_len(),
        held,
    };
    Ok((medium, descriptor))
}

/// To be read alone, and whose later owner need not wait for who has it.
fn shown(arena: &Arena) -> Result<Offered, Error> {
    let (descriptor, _) = arena.descriptor(false)?;
    let medium = Medium {
        number: arena.number(),
        kind: Kind::Shown,
        len: arena.medium_len(),
        held: false,
    };
    Ok((medium, descriptor))
}

fn directory((number, Directory { dir, direct }): (u32, Directory)) -> Result<Offered, Error> {
    let medium = Medium {
        number,
        kind: Kind::Directory { direct },
        len: 0,
        held: true,
    };
    Ok((medium, LentFd::open(|| dir.twin())?))
}

/// In memory that only descriptors lead to, as everything else that is offered.
fn door((number, DoorKey { name, bytes }): (u32, DoorKey)) -> Result<Offered, Error> {
    let said = [name.as_bytes(), b"\n", &bytes].concat();
    let write = || -> Result<OwnedFd, Error> {
        let file = File::from(fds::memory_file("kvdepot-door")?);
        let written = file.write_all_at(&said, 0);
        written.map_err(|source| Error::Io {
            path: "cannot exchange the address of a remote reader".into(),
            source,
        })?;
        Ok(file.into())
    };
    let medium = Medium {
        number,
        kind: Kind::Door,
        len: said.len() as u64,
        held: true,
    };
    Ok((medium, LentFd::open(write)?))
}
