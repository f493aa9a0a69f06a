//! The owner's media as they are open here, its directories, and its doors.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvdepot_arena::{self as arena, Error};
use kvdepot_host::fork::LockFd;
use kvdepot_media::Mapping;
use parking_lot::RwLock;

use super::doors::Doors;
use super::files::Files;
use crate::frame::hello::{Kind, Medium, Role};

/// A medium, and its number.
type Numbered = (u32, Arc<dyn arena::Medium>);

/// What came with descriptors.
type Offered = Vec<(Medium, LockFd)>;

/// What an owner has.
pub(super) struct Media {
    /// By their numbers, near to far.
    open: RwLock<Vec<Numbered>>,
    /// Those that are read alone, a part of a tier that is elsewhere, too.
    shown: RwLock<Vec<Numbered>>,
    pub(super) files: Files,
    pub(super) doors: Doors,
    /// The owner is gone, and they were let go with it.
    ended: AtomicBool,
}

/// Opens media, but those that are known by number and length.
fn open(media: Offered, writes: bool, known: &[(u32, u64)]) -> Result<Vec<Numbered>, Error> {
    let new = media
        .into_iter()
        .filter(|(Medium { number, len, .. }, _)| !known.contains(&(*number, *len)));
    let open = |(medium, fd): (Medium, LockFd)| {
        let access = match medium.kind {
            Kind::Called => arena::Access::Direct,
            _ => arena::Access::Mapped,
        };
        let opened = arena::adopt(fd, medium.len, writes, access)?;
        Ok((medium.number, opened))
    };
    new.map(open).collect()
}

/// Has `media` be those that are offered: what is open already stays.
fn update(media: &mut Vec<Numbered>, offered: Offered, writes: bool) -> Result<(), Error> {
    let listed: Vec<u32> = offered.iter().map(|(medium, _)| medium.number).collect();
    media.retain(|(number, _)| listed.contains(number));
    let known: Vec<(u32, u64)> = media.iter().map(|(n, medium)| (*n, medium.len())).collect();
    for (number, medium) in open(offered, writes, &known)? {
        // Batches that use the smaller one keep it.
        media.retain(|(known, _)| *known != number);
        media.push((number, medium));
    }
    media.sort_by_key(|(number, _)| *number);
    Ok(())
}

impl Media {
    pub(super) fn new(offered: Offered, role: Role, lanes: usize) -> Result<Media, Error> {
        let media = Media {
            open: RwLock::default(),
            shown: RwLock::default(),
            files: Files::new(lanes),
            doors: Doors::default(),
            ended: AtomicBool::new(false),
        };
        media.learn(offered, role)?;
        Ok(media)
    }

    /// Takes what the owner has now.
    pub(super) fn learn(&self, mut offered: Offered, role: Role) -> Result<(), Error> {
        self.files.learn(&mut offered)?;
        self.doors.learn(&mut offered);
        let shown = offered.extract_if(.., |(medium, _)| medium.kind == Kind::Shown);
        let shown: Offered = shown.collect();
        let (mut open, mut read) = (self.open.write(), self.shown.write());
        if self.has_ended() {
            return Ok(());
        }
        update(&mut open, offered, role.writes())?;
        update(&mut read, shown, false)
    }

    pub(super) fn let_go(&self) {
        self.ended.store(true, Ordering::SeqCst);
        self.open.write().clear();
        self.shown.write().clear();
        self.files.let_go();
        self.doors.let_go();
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    /// Those that are the owner's alone.
    pub(super) fn mappings(&self) -> Vec<Arc<Mapping>> {
        let media = self.open.read();
        let mapped = media.iter().filter_map(|(_, medium)| medium.mapping());
        mapped.map(Arc::clone).collect()
    }

    /// Which of those a medium is; none where it has no addresses.
    pub(super) fn position(&self, number: u32) -> Option<usize> {
        let media = self.open.read();
        let mut mapped = media
            .iter()
            .filter(|(_, medium)| medium.mapping().is_some());
        mapped.position(|(known, _)| *known == number)
    }

    /// A medium by its number that goes as far as `end`.
    pub(super) fn find(&self, number: u32, end: u64) -> Option<Arc<dyn arena::Medium>> {
        [&self.open, &self.shown].into_iter().find_map(|media| {
            let media = media.read();
            let mut all = media.iter();
            let found = all.find(|(known, medium)| *known == number && medium.len() >= end);
            found.map(|(_, medium)| Arc::clone(medium))
        })
    }

    /// Lets a medium go.
    pub(super) fn forget(&self, number: u32) {
        self.open.write().retain(|(known, _)| *known != number);
    }
}
