//! Where a tier's bytes lie: memory, what only a carrier reaches, or a file.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvdepot_host::dir::Dir;
use kvdepot_media::file::{File, Hands};
use kvdepot_media::{Alignment, Buffer, Carrier, Op, Receipt};
use kvdepot_store::{BlockFile, Outside};

/// Where the bytes of the tiers of a history lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bytes {
    Memory,
    Carried,
    /// Movers reach them too.
    Files,
    /// The last tier is `Posix` itself.
    Posix,
}

/// The bytes of one block.
#[derive(Clone)]
pub enum Memory {
    Here(Buffer),
    Carried(Arc<Carried>),
    File(Arc<InFile>),
}

/// Bytes that a carrier reaches. Each carry is a step of the schedule.
#[derive(Debug)]
pub struct Carried(Mutex<Vec<u8>>);

/// A block's file, which goes with it.
pub struct InFile {
    file: BlockFile,
    path: PathBuf,
    name: String,
    len: usize,
}

/// A tier's files.
pub struct Folder {
    path: PathBuf,
    pub dir: Arc<Dir>,
    hands: Arc<Hands>,
    next: AtomicU64,
}

impl Folder {
    /// In a simulation: what its threads would do is done at once.
    pub fn new(path: PathBuf) -> Folder {
        fs::create_dir(&path).unwrap();
        Folder {
            dir: Arc::new(Dir::open(&path).unwrap()),
            path,
            hands: Hands::new(1).unwrap(),
            next: AtomicU64::new(0),
        }
    }

    pub fn file(&self, len: usize) -> Memory {
        let name = self.next.fetch_add(1, Ordering::Relaxed).to_string();
        let path = self.path.join(&name);
        let mut options = fs::File::options();
        let raw = options.read(true).write(true).create_new(true).open(&path);
        let raw = raw.unwrap();
        raw.set_len(len as u64).unwrap();
        let inode = raw.metadata().unwrap().ino();
        let file = BlockFile::new(File::new(raw, &self.hands).unwrap(), inode, 0);
        Memory::File(Arc::new(InFile {
            file,
            path,
            name,
            len,
        }))
    }
}

impl Drop for InFile {
    fn drop(&mut self) {
        let _gone = fs::remove_file(&self.path);
    }
}

impl Memory {
    pub fn new(len: usize, carried: bool) -> Memory {
        match carried {
            true => Memory::Carried(Arc::new(Carried(Mutex::new(vec![0; len])))),
            false => Memory::Here(Buffer::from_vec(vec![0; len])),
        }
    }

    pub fn buffer(&self) -> Buffer {
        match self {
            Memory::Here(buffer) => buffer.clone(),
            Memory::Carried(bytes) => {
                let len = bytes.bytes().len();
                Buffer::carried(Arc::clone(bytes) as _, 0, len, true)
            }
            Memory::File(file) => file.file.payload(0, file.len as u64),
        }
    }

    pub fn to_vec(&self) -> Vec<u8> {
        match self {
            Memory::Here(buffer) => buffer.to_vec(),
            Memory::Carried(bytes) => bytes.bytes().clone(),
            Memory::File(file) => {
                let mut bytes = vec![0; file.len];
                file.file.raw().read_exact_at(0, &mut bytes).unwrap();
                bytes
            }
        }
    }

    pub fn write(&self, at: usize, bytes: &[u8]) {
        match self {
            Memory::Here(buffer) => buffer.write_at(at, bytes).unwrap(),
            Memory::Carried(carried) => {
                carried.bytes()[at..at + bytes.len()].copy_from_slice(bytes);
            }
            Memory::File(file) => file.file.raw().write_all_at(at as u64, bytes).unwrap(),
        }
    }

    /// Turns a byte over.
    pub fn flip(&self, at: usize) {
        let byte = self.to_vec()[at] ^ 1;
        self.write(at, &[byte]);
    }

    /// Whether they are the same bytes, not equal ones.
    pub fn is(&self, other: &Memory) -> bool {
        match (self, other) {
            (Memory::Here(one), Memory::Here(other)) => one.addr() == other.addr(),
            (Memory::Carried(one), Memory::Carried(other)) => Arc::ptr_eq(one, other),
            (Memory::File(one), Memory::File(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }

    /// The file that has them.
    pub fn block_file(&self) -> Option<&BlockFile> {
        match self {
            Memory::File(file) => Some(&file.file),
            _ => None,
        }
    }

    /// The same for others.
    pub fn file(&self) -> Option<Outside> {
        let Memory::File(file) = self else {
            return None;
        };
        Some(Outside {
            name: file.name.clone(),
            number: file.file.inode(),
            offset: 0,
        })
    }
}

impl Carried {
    fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Carrier for Carried {
    fn alignment(&self) -> Alignment {
        Alignment::NONE
    }

    fn carry(self: Arc<Self>, receipts: Vec<Receipt>) {
        for mut receipt in receipts {
            let at = receipt.at() as usize;
            let len = {
                let mut bytes = self.bytes();
                let len = bytes.len().saturating_sub(at).min(receipt.len());
                let range = &mut bytes[at..at + len];
                match receipt.op() {
                    Op::Read => receipt.fill(0, range),
                    Op::Write => receipt.copy_to(0, range),
                }
                len
            };
            receipt.carried(len);
        }
    }
}
