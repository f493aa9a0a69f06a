//! One file a block: a header, then the payload, read and written at offsets by threads. Written
//! under a name of its own and published by a rename; a pin is an open file. Other processes have
//! the directory, and open what is pinned or reserved there by its name.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use kvdepot_arena::parts::Part;
use kvdepot_arena::{Place, Refused, Reserved, TakesBack, Token, Wanted};
use kvdepot_host::dir::{Access, Dir};
use kvdepot_media::file::{File, Hands};
use kvdepot_media::{Buffer, Checksum};
use kvdepot_store::option::{Kind, OptionSpec};
use kvdepot_store::{
    BlockFile, Directory, Ends, Error, Identity, Key, Kinds, NamespaceId, Outside, Page, Reply,
    Tier, TierKind, TierStats,
};

/// Bytes before the payload: length, parts, checksum.
const HEADER: u64 = 4096;

const OPTIONS: &[OptionSpec] = &[OptionSpec::new(
    "files",
    "path",
    Kind::Text,
    "none",
    "The directory.",
)];

/// The kind `Files`, with the section `files: {path: …}`.
pub fn kind() -> TierKind {
    kind_that(true)
}

/// The same of a tier that says whether it outlives the process.
pub fn kind_that(lasts: bool) -> TierKind {
    kind_of(lasts, 1 << 30)
}

/// The same, which takes blocks of that many bytes at most.
pub fn kind_of(lasts: bool, block_max: u64) -> TierKind {
    TierKind {
        name: "Files",
        options: OPTIONS,
        check: |_, _| Ok(()),
        open: Arc::new(move |section, terms| {
            let path = section.path("path");
            let path = path.ok_or(Error::Closed("files.path is missing"))?;
            Ok(Files::open(&path, terms.number, (lasts, block_max))?)
        }),
    }
}

pub fn kinds() -> Kinds {
    Kinds::new().with(kind())
}

pub struct Files {
    path: PathBuf,
    number: u32,
    lasts: bool,
    block_max: u64,
    hands: Arc<Hands>,
    open: Arc<Open>,
}

/// What is pinned or reserved, by sequence.
struct Open {
    dir: Arc<Dir>,
    path: PathBuf,
    next: AtomicU64,
    files: Mutex<HashMap<u64, Opened>>,
}

struct Opened {
    file: Arc<BlockFile>,
    name: String,
    place: Place,
    holds: u32,
    /// A copy, while it is written, and whether its block was removed meanwhile.
    copy: bool,
    removed: bool,
}

impl Files {
    pub fn open(
        dir: &Path,
        number: u32,
        (lasts, block_max): (bool, u64),
    ) -> Result<Arc<Files>, Error> {
        let io = |source| Error::Io {
            path: dir.into(),
            source,
        };
        fs::create_dir_all(dir).map_err(io)?;
        let open = Open {
            dir: Arc::new(Dir::open(dir)?),
            path: dir.into(),
            next: AtomicU64::new(0),
            files: Mutex::default(),
        };
        Ok(Arc::new(Files {
            path: dir.into(),
            number,
            lasts,
            block_max,
            hands: Hands::new(2)?,
            open: Arc::new(open),
        }))
    }

    pub fn path_of(&self, identity: &Identity) -> PathBuf {
        self.path.join(name_of(identity))
    }

    fn delete(&self, identity: &Identity) -> bool {
        fs::remove_file(self.path_of(identity)).is_ok()
    }

    /// Opens a file and holds it once.
    fn hold(&self, name: String, raw: fs::File, mut place: Place) -> Option<Place> {
        let sequence = self.open.next.fetch_add(1, Ordering::Relaxed) + 1;
        place.token = Token {
            device: self.number,
            slot: 0,
            sequence,
        };
        let inode = raw.metadata().ok()?.ino();
        let file = File::new(raw, &self.hands).ok()?;
        let opened = Opened {
            file: Arc::new(BlockFile::new(file, inode, HEADER)),
            name,
            place,
            holds: 1,
            copy: false,
            removed: false,
        };
        self.open.files.lock().unwrap().insert(sequence, opened);
        Some(place)
    }

    fn find(&self, identity: Identity) -> Option<Place> {
        let name = name_of(&identity);
        let raw = fs::File::from(self.open.dir.open_at(&name, Access::Read).ok()??);
        let mut header = [0; 26];
        raw.read_exact_at(&mut header, 0).ok()?;
        let place = Place {
            len: u64::from_le_bytes(header[..8].try_into().ok()?),
            parts: u16::from_le_bytes(header[8..10].try_into().ok()?),
            checksum: Checksum(header[10..].try_into().ok()?),
            ..Place::of(identity)
        };
        self.hold(name, raw, place)
    }

    fn make(&self, namespace: NamespaceId, wanted: &Wanted) -> Option<Reserved> {
        let identity = Identity {
            namespace,
            key: wanted.key,
        };
        let next = self.open.next.fetch_add(1, Ordering::Relaxed);
        let name = format!("{next}.{}.new", std::process::id());
        let mut options = fs::OpenOptions::new();
        let options = options.read(true).write(true).create_new(true);
        let raw = options.open(self.path.join(&name));
        let place = Place {
            len: wanted.len,
            parts: wanted.parts,
            ..Place::of(identity)
        };
        let place = self.hold(name, raw.ok()?, place)?;
        let mut files = self.open.files.lock().unwrap();
        files.get_mut(&place.token.sequence)?.copy = wanted.copy;
        drop(files);
        Some(Reserved::new(Arc::clone(&self.open) as _, place))
    }

    fn publish(&self, mut reserved: Reserved, checksum: Checksum, pinned: bool) -> bool {
        let place = reserved.hand_out();
        let mut files = self.open.files.lock().unwrap();
        let Some(opened) = files.get_mut(&place.token.sequence) else {
            return false;
        };
        let mut header = Vec::from(place.len.to_le_bytes());
        header.extend(place.parts.to_le_bytes());
        header.extend(checksum.0);
        let (from, to) = (self.path.join(&opened.name), name_of(&place.identity));
        let whole = opened.file.raw().write_all_at(0, &header).is_ok();
        let wanted = whole && !opened.removed;
        let stored = wanted && fs::rename(&from, self.path.join(&to)).is_ok();
        if !stored {
            let _gone = fs::remove_file(&from);
        }
        opened.copy = false;
        opened.place.checksum = checksum;
        opened.name = to;
        if !pinned || !stored {
            files.remove(&place.token.sequence);
        }
        stored
    }
}

fn name_of(identity: &Identity) -> String {
    format!("{}-{}", identity.namespace, identity.key)
}

impl TakesBack for Open {
    fn take_back(&self, token: Token) {
        if let Some(opened) = self.files.lock().unwrap().remove(&token.sequence) {
            fs::remove_file(self.path.join(opened.name)).unwrap();
        }
    }
}

impl Tier for Files {
    fn name(&self) -> &'static str {
        "Files"
    }

    fn lasts(&self) -> bool {
        self.lasts
    }

    fn block_max(&self) -> u64 {
        self.block_max
    }

    fn probe(&self, namespace: NamespaceId, keys: &[Key], reply: Reply<Vec<bool>>) {
        let has = |key: &Key| {
            let key = *key;
            self.path_of(&Identity { namespace, key }).exists()
        };
        reply.answer(keys.iter().map(has).collect());
    }

    fn pin(
        &self,
        namespace: NamespaceId,
        keys: &[Key],
        _used: &[u64],
        reply: Reply<Vec<Option<Place>>>,
    ) {
        let find = |key: &Key| {
            let key = *key;
            self.find(Identity { namespace, key })
        };
        reply.answer(keys.iter().map(find).collect());
    }

    fn unpin(&self, places: &[Place]) {
        let mut files = self.open.files.lock().unwrap();
        for place in places {
            let opened = files.get_mut(&place.token.sequence).expect("a pin");
            opened.holds -= 1;
            if opened.holds == 0 {
                files.remove(&place.token.sequence);
            }
        }
    }

    fn discard(&self, places: &[Place], reply: Reply<usize>) {
        let gone = |place: &&Place| self.delete(&place.identity);
        reply.answer(places.iter().filter(gone).count());
    }

    fn reserve(
        &self,
        namespace: NamespaceId,
        blocks: &[Wanted],
        reply: Reply<Vec<Result<Reserved, Refused>>>,
    ) {
        let nowhere = Token {
            device: self.number,
            slot: 0,
            sequence: 0,
        };
        let place = |wanted: &Wanted| {
            let key = wanted.key;
            let identity = Identity { namespace, key };
            if self.path_of(&identity).exists() {
                return Err(Refused::Present(nowhere));
            }
            let files = self.open.files.lock().unwrap();
            let is_new = |opened: &&Opened| opened.name.ends_with(".new");
            let mut new = files.values().filter(is_new);
            if new.any(|opened| opened.place.identity == identity) {
                return Err(Refused::Reserved(nowhere));
            }
            drop(files);
            self.make(namespace, wanted).ok_or(Refused::Declined)
        };
        reply.answer(blocks.iter().map(place).collect());
    }

    fn commit(&self, written: Vec<(Reserved, Checksum)>, pinned: bool, reply: Reply<Vec<bool>>) {
        let each = written.into_iter();
        let each = each.map(|(reserved, checksum)| self.publish(reserved, checksum, pinned));
        reply.answer(each.collect());
    }

    fn remove(&self, namespace: NamespaceId, keys: &[Key], reply: Reply<Vec<bool>>) {
        let mut files = self.open.files.lock().unwrap();
        let copies = files.values_mut().filter(|opened| opened.copy);
        for opened in copies.filter(|opened| opened.place.identity.namespace == namespace) {
            opened.removed |= keys.contains(&opened.place.identity.key);
        }
        drop(files);
        let remove = |key: &Key| {
            let key = *key;
            self.delete(&Identity { namespace, key })
        };
        reply.answer(keys.iter().map(remove).collect());
    }

    fn clear(&self, namespace: NamespaceId, reply: Reply<usize>) {
        let mut files = self.open.files.lock().unwrap();
        for opened in files.values_mut().filter(|opened| opened.copy) {
            opened.removed |= opened.place.identity.namespace == namespace;
        }
        drop(files);
        let names = self.all(namespace).into_iter();
        let names = names.map(|(key, _)| Identity { namespace, key });
        reply.answer(names.filter(|name| self.delete(name)).count());
    }

    fn list(&self, namespace: NamespaceId, _from: u64, _limit: usize, reply: Reply<Page>) {
        reply.answer((self.all(namespace), None));
    }

    fn describe(&self, _namespace: NamespaceId, _description: &str) {}

    fn stats(&self) -> TierStats {
        TierStats::new("Files")
    }

    fn ends(&self) -> Arc<dyn Ends> {
        Arc::clone(&self.open) as _
    }

    fn close(&self) {
        assert!(self.open.files.lock().unwrap().is_empty(), "files are held");
    }
}

impl Files {
    fn all(&self, namespace: NamespaceId) -> Vec<(Key, u64)> {
        let prefix = format!("{namespace}-");
        let names = fs::read_dir(&self.path)
            .unwrap()
            .map(|entry| entry.unwrap());
        let of = |entry: fs::DirEntry| {
            let name = entry.file_name().into_string().unwrap();
            let hex = name.strip_prefix(&prefix)?;
            let byte = |at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap();
            let key = Key(std::array::from_fn(byte));
            let place = self.find(Identity { namespace, key })?;
            self.unpin(&[place]);
            Some((key, place.len))
        };
        names.filter_map(of).collect()
    }
}

impl Open {
    fn get<R>(&self, place: &Place, read: impl FnOnce(&Opened) -> R) -> Result<R, Error> {
        let files = self.files.lock().unwrap();
        let opened = files.get(&place.token.sequence);
        opened.map(read).ok_or(Error::Closed("a file is closed"))
    }

    fn file_of(&self, place: &Place) -> Result<Arc<BlockFile>, Error> {
        self.get(place, |opened| Arc::clone(&opened.file))
    }
}

impl Ends for Open {
    fn buffers(
        &self,
        place: &Place,
        offset: u64,
        len: u64,
        ends: &mut Vec<Buffer>,
    ) -> Result<(), Error> {
        self.file_of(place)?.buffers(place, offset, len, ends)
    }

    fn parts(&self, place: &Place) -> Result<Option<Vec<Part>>, Error> {
        self.file_of(place)?.parts(place)
    }

    fn write_parts(&self, place: &Place, found: &[Part]) -> Result<(), Error> {
        self.file_of(place)?.write_parts(place, found)
    }

    fn directory(&self) -> Option<Directory> {
        Some(Directory {
            dir: Arc::clone(&self.dir),
            direct: false,
        })
    }

    fn outside(&self, place: &Place) -> Option<Outside> {
        let file = |opened: &Opened| Outside {
            name: opened.name.clone(),
            number: opened.file.inode(),
            offset: HEADER,
        };
        self.get(place, file).ok()
    }
}
