//! Against the double of 3FS's library in `crates/testkit/usrbio`, which is compiled here.

use super::*;
use crate::conformance::{InMemory, Medium, Room, double, every_pair};
use crate::file::{File, Hands};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

/// Nothing here takes as long, unless it does not answer.
const LONG: Duration = Duration::from_secs(60);

/// The double and a folder that is its 3FS. One at a time: it counts for the process.
struct Mounted {
    library: PathBuf,
    folder: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Mounted {
    fn new() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        static BUILT: OnceLock<PathBuf> = OnceLock::new();
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let build = || kvdepot_testkit::double::build("usrbio");
        let mounted = Self {
            library: BUILT.get_or_init(build).clone(),
            folder: tempfile::tempdir().unwrap(),
            _turn: turn,
        };
        let path = std::ffi::CString::new(mounted.folder.path().to_str().unwrap()).unwrap();
        mounted.say("double_mount", path.as_ptr().expose_provenance() as i64);
        mounted
    }

    fn say(&self, function: &str, argument: i64) -> i64 {
        double(&self.library, function, argument)
    }

    fn ask(&self, function: &str) -> i64 {
        self.say(function, 0)
    }

    fn config(&self, patience: Duration) -> UsrbioConfig {
        UsrbioConfig {
            library: self.library.clone(),
            path: self.folder.path().to_owned(),
            streams: 2,
            running: 32,
            waiting: 1024,
            patience,
        }
    }

    fn hands(&self, patience: Duration) -> Arc<Hands> {
        Hands::usrbio(&self.config(patience)).unwrap()
    }

    /// What has gone with its owners, a little later.
    fn is_left(&self) {
        let end = Instant::now() + LONG;
        let counts = ["double_registered", "double_rings", "double_iovs"];
        while counts.iter().any(|count| self.ask(count) > 0) || self.links() > 0 {
            let left = counts.map(|count| self.ask(count));
            assert!(Instant::now() < end, "{left:?}, {} links", self.links());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(self.ask("double_misused"), 0);
    }

    fn links(&self) -> usize {
        let links = self.folder.path().join("3fs-virt/iovs");
        std::fs::read_dir(links).unwrap().count()
    }
}

/// A file there, with room for whatever is asked for.
struct There {
    file: Arc<File>,
    plain: Arc<std::fs::File>,
    end: Mutex<usize>,
}

impl There {
    fn new(mounted: &Mounted, hands: &Arc<Hands>) -> Self {
        let path = mounted.folder.path();
        let mut options = std::fs::File::options();
        let options = options.read(true).write(true);
        let named = tempfile::NamedTempFile::new_in(path).unwrap();
        let (_, path) = named.keep().unwrap();
        Self {
            file: File::new(options.open(&path).unwrap(), hands).unwrap(),
            plain: Arc::new(options.open(&path).unwrap()),
            end: Mutex::new(0),
        }
    }
}

impl Medium for There {
    fn name(&self) -> String {
        "a file of a 3FS".to_owned()
    }

    fn room(&self, len: usize) -> Room {
        let mut end = self.end.lock().unwrap();
        let begin = *end;
        *end = begin + len;
        self.plain.set_len(*end as u64).unwrap();
        let (look, fill) = (Arc::clone(&self.plain), Arc::clone(&self.plain));
        Room {
            buffer: self.file.buffer(begin, len),
            look: Box::new(move || {
                let mut bytes = vec![0; len];
                look.read_exact_at(&mut bytes, begin as u64).unwrap();
                bytes
            }),
            fill: Box::new(move |bytes| fill.write_all_at(bytes, begin as u64).unwrap()),
        }
    }
}

#[test]
fn files_of_a_3fs_keep_the_contract_in_both_directions() {
    let mounted = Mounted::new();
    for reorder in [0, 1] {
        mounted.say("double_reorder", reorder);
        let hands = mounted.hands(LONG);
        let (one, other) = (There::new(&mounted, &hands), There::new(&mounted, &hands));
        every_pair(&[&InMemory, &one, &other]);
        drop((one, other, hands));
        mounted.is_left();
    }
    mounted.say("double_reorder", 0);
}
