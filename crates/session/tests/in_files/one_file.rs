//! One session as one file: what is saved from memory or said by a serializer comes back to the
//! bit, and a save that goes wrong leaves nothing.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{self, longest, restore as bring_back, rows, sessions, tokens};
use crate::parts::{Parts, checkpoint, mover, mover as other, names, namespace};
use kvdepot_session::file::{Member, SessionFile, SessionWriter, save_file};
use kvdepot_session::{Error, export, import, look};
use kvdepot_store::{BlockBuffers, Buffer, Durability};
use kvdepot_testkit::Rng;
use kvdepot_testkit::bytes::content;

const MIB: usize = 1 << 20;

#[test]
fn a_session_goes_from_memory_to_a_file_and_back() {
    let mut rng = Rng::for_test("one_file::a_session_goes_from_memory_to_a_file_and_back");
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("conversation.kvs");
    for round in 0..24 {
        let direct = rng.once_in(2);
        let mover = mover(direct, Durability::Process);
        let parts = Parts::random(&mut rng);
        let prompt = parts.tokens();
        let spec = namespace("w");
        let saved = save_file(
            &mover,
            &path,
            &checkpoint(&spec, &prompt),
            // At any address: what the disk does not take as it lies goes through a buffer.
            &parts.pieces(rng.below(600) as usize),
            &parts.objects(rng.below(3) as usize * 512),
        );
        let saved = saved.unwrap();
        assert_eq!(saved.bytes_written, path.metadata().unwrap().len());
        assert_eq!(
            (saved.cached_tokens, saved.cache_write_tokens),
            (0, prompt.len())
        );
        // Read by another, in another way.
        let file = SessionFile::open(&other(!direct, Durability::Power), &path).unwrap();
        assert_eq!((file.id(), &file.about().tokens), (saved.id, &prompt));
        assert_eq!(file.about().bytes(), parts.bytes());
        assert_eq!(parts.restore(&file), (prompt.len(), true), "round {round}");
        assert!(file.verify().unwrap().missing.is_empty());
        assert_eq!(names(home.path()), ["conversation.kvs"]);
    }
}

/// Says some bytes, a few at a time.
struct Says<'a>(&'a [u8], Rng);

impl Read for Says<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let most = out.len().min(self.0.len());
        let len = match most {
            0 => return Ok(0),
            most => 1 + self.1.below(most as u64) as usize,
        };
        out[..len].copy_from_slice(&self.0[..len]);
        self.0 = &self.0[len..];
        Ok(len)
    }
}

#[test]
fn what_a_serializer_says_is_written_once_whether_its_length_is_known_or_not() {
    let mut rng = Rng::for_test("what_a_serializer_says_is_written_once");
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("stream.kvs");
    let (spec, prompt) = (namespace("w"), tokens(100, 1));
    let lens = [
        1,
        4095,
        4096,
        4 * MIB - 1,
        4 * MIB,
        4 * MIB + 1,
        21 * MIB + 17,
    ];
    for (number, len) in lens.into_iter().enumerate() {
        for is_known in [false, true] {
            let mover = mover(number % 2 == 0, Durability::Process);
            let said = content(number as u64, len);
            let predicted = is_known.then_some(2 * len as u64);
            let checkpoint = checkpoint(&spec, &prompt);
            let mut writer = SessionWriter::new(&mover, &path, &checkpoint, predicted).unwrap();
            writer.begin(Member::Object("state".into())).unwrap();
            let mut says = Says(&said, rng.fork());
            assert_eq!(writer.fill(&mut says).unwrap(), len as u64);
            assert_eq!(writer.end().unwrap(), len as u64);
            writer.begin(Member::Object("again".into())).unwrap();
            for some in said.chunks(700_001) {
                writer.write(some).unwrap();
            }
            writer.end().unwrap();
            let saved = writer.finish().unwrap();
            let about = path.metadata().unwrap();
            assert_eq!(saved.bytes_written, about.len());
            // Nothing of the space that it has had beforehand is left.
            use std::os::unix::fs::MetadataExt;
            assert!(
                about.blocks() * 512 <= about.len() + 64 * 1024,
                "{len} bytes"
            );
            let file = SessionFile::open(&mover, &path).unwrap();
            for member in 0..2 {
                let mut all = Vec::new();
                let read = file.read(member, &mut |some| {
                    all.extend_from_slice(some);
                    Ok(())
                });
                read.unwrap();
                assert!(all == said, "member {member} of {len} bytes");
            }
            assert!(file.read(2, &mut |_| Ok(())).is_err());
            let into = [0, 1].map(|_| Buffer::from_vec(vec![0; len]));
            let into = BlockBuffers::whole(into);
            let restored = file.restore(&BlockBuffers::default(), &into).unwrap();
            assert_eq!((restored.cached_tokens, restored.whole), (100, true));
            assert!(into.pieces(1)[0].to_vec() == said);
        }
    }
}

#[test]
fn a_payload_of_another_length_than_predicted_leaves_what_was_there() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("a.kvs");
    let (mover, spec, prompt) = (
        mover(true, Durability::Power),
        namespace("w"),
        tokens(10, 1),
    );
    let old = Parts::new(1, &[5000], &[]);
    let old_tokens = old.tokens();
    save_file(
        &mover,
        &path,
        &checkpoint(&spec, &old_tokens),
        &old.pieces(0),
        &[],
    )
    .unwrap();
    let before = std::fs::read(&path).unwrap();
    let said = content(3, 9 * MIB);
    for (predicted, from_memory) in [
        (said.len() - 1, false),
        (said.len() + 1, false),
        (said.len() - 1, true),
        (said.len() + 1, true),
        (0, true),
        (usize::MAX >> 8, true),
    ] {
        let checkpoint = checkpoint(&spec, &prompt);
        let failed = (|| {
            let mut writer =
                SessionWriter::new(&mover, &path, &checkpoint, Some(predicted as u64))?;
            let member = Member::Object("state".into());
            match from_memory {
                true => writer.put(member, &[Buffer::from_vec(said.clone())])?,
                false => {
                    writer.begin(member)?;
                    writer.write(&said)?;
                    writer.end()?;
                }
            }
            writer.finish()
        })();
        let error = failed.unwrap_err();
        let text = error.to_string();
        match predicted > 1 << 40 {
            // No disk has that much.
            true => assert!(matches!(error, Error::Io { .. }), "{text}"),
            false => assert!(text.contains("the predicted size"), "{text}"),
        }
        assert_eq!(names(home.path()), ["a.kvs"]);
        assert!(std::fs::read(&path).unwrap() == before);
    }
}

#[test]
fn what_cannot_be_is_refused_with_its_name_and_leaves_nothing() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("a.kvs");
    let (mover, spec, prompt) = (
        mover(true, Durability::Process),
        namespace("w"),
        tokens(100, 1),
    );
    let byte = || Buffer::from_vec(vec![1]);
    let new = || SessionWriter::new(&mover, &path, &checkpoint(&spec, &prompt), None).unwrap();
    let object = |name: &str| Member::Object(name.to_owned());
    let said = |result: Result<(), Error>| result.unwrap_err().to_string();

    let mut writer = new();
    writer.put(object("a"), &[byte()]).unwrap();
    assert!(said(writer.put(object("a"), &[byte()])).contains("\"a\" twice"));
    assert!(said(writer.put(object("b"), &[byte()])).contains("failed"));
    assert!(writer.finish().is_err());
    let mut writer = new();
    writer.put(object("a"), &[byte()]).unwrap();
    assert!(
        said(writer.put(Member::Piece, &[byte()])).contains("all pieces before the first object")
    );
    let mut writer = new();
    assert!(said(writer.put(Member::Piece, &[])).contains("0 bytes"));
    let mut writer = new();
    assert!(said(writer.write(&[1])).contains("started"));
    let mut writer = new();
    writer.begin(Member::Piece).unwrap();
    assert!(said(writer.begin(Member::Piece)).contains("one piece or object at a time"));
    let mut writer = new();
    writer.begin(Member::Piece).unwrap();
    assert!(
        writer
            .finish()
            .unwrap_err()
            .to_string()
            .contains("finished")
    );
    // One piece, and the tokens of two.
    let mut writer = new();
    writer.put(Member::Piece, &[byte()]).unwrap();
    assert!(writer.finish().unwrap_err().to_string().contains("pieces"));
    assert!(new().finish().unwrap_err().to_string().contains("neither"));
    let mut writer = new();
    writer.begin(Member::Piece).unwrap();
    let failing = &mut io::empty().chain(Fails);
    assert!(
        writer
            .fill(failing)
            .unwrap_err()
            .to_string()
            .contains("the engine's")
    );

    let nothing = checkpoint(&spec, &[]);
    let none = SessionWriter::new(&mover, &path, &nothing, None).unwrap_err();
    assert!(none.to_string().contains("tokens"));
    let folder = SessionWriter::new(&mover, home.path(), &checkpoint(&spec, &prompt), None);
    assert!(folder.unwrap_err().to_string().contains("file"));
    let nowhere = home.path().join("none/a.kvs");
    assert!(SessionWriter::new(&mover, &nowhere, &checkpoint(&spec, &prompt), None).is_err());
    assert!(SessionFile::open(&mover, &path).is_err());
    assert!(SessionFile::open(&mover, home.path()).is_err());
    assert_eq!(names(home.path()), [""; 0]);
}

struct Fails;

impl Read for Fails {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Err(io::Error::other("the engine's own trouble"))
    }
}

#[test]
fn buffers_of_other_lengths_are_refused_before_a_byte_moves() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("a.kvs");
    let (mover, spec) = (mover(true, Durability::Process), namespace("w"));
    let parts = Parts::new(1, &[5000, 10], &[300]);
    let prompt = parts.tokens();
    let (pieces, objects) = (parts.pieces(0), parts.objects(0));
    save_file(
        &mover,
        &path,
        &checkpoint(&spec, &prompt),
        &pieces,
        &objects,
    )
    .unwrap();
    let file = SessionFile::open(&mover, &path).unwrap();
    let buffers = |lens: &[usize]| {
        BlockBuffers::whole(lens.iter().map(|len| Buffer::from_vec(vec![7; *len])))
    };
    let one = buffers(&[300]);
    for (rows, objects, what) in [
        (buffers(&[5000]), &one, "rows"),
        (buffers(&[5000, 11]), &one, "rows"),
        (buffers(&[5000, 10]), &buffers(&[]), "objects"),
    ] {
        let refused = file.restore(&rows, objects).unwrap_err().to_string();
        assert!(refused.starts_with(what), "{refused}");
        assert_eq!(rows.pieces(0)[0].to_vec(), [7; 5000]);
    }
    let fixed = BlockBuffers::whole([
        Buffer::from_vec(vec![0; 5000]).read_only(),
        Buffer::from_vec(vec![0; 10]),
    ]);
    assert!(file.restore(&fixed, &one).is_err());
}

#[test]
fn files_of_the_first_version_are_read_still() {
    let home = tempfile::tempdir().unwrap();
    let old = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/archives/version1.kvs");
    let about = look(&old).unwrap();
    assert_eq!((about.tokens.len(), about.piece_bytes.len()), (300, 5));
    let store = sessions(home.path());
    let imported = import(&store, &old).unwrap();
    let found = longest(&store, &tokens(300, 1)).unwrap();
    assert_eq!(
        (imported.tokens, bring_back(&store, &found)),
        (300, (true, 300))
    );
    // What changes in one is refused.
    let whole = std::fs::read(&old).unwrap();
    let path = home.path().join("wrong.kvs");
    for at in [3, 9, 17, 40, whole.len() / 2, whole.len() - 1] {
        let mut wrong = whole.clone();
        wrong[at] ^= 1;
        std::fs::write(&path, &wrong).unwrap();
        assert!(import(&store, &path).is_err(), "byte {at}");
        assert!(look(&path).is_err(), "byte {at}");
    }
    // As a file of this version it is the same session.
    let new = home.path().join("new.kvs");
    export(&store, imported.id, &new).unwrap();
    let file = SessionFile::open(&mover(true, Durability::Process), &new).unwrap();
    assert_eq!(file.about(), &about);
    let mut piece = Vec::new();
    let read = file.read(2, &mut |some| {
        piece.extend_from_slice(some);
        Ok(())
    });
    read.unwrap();
    assert_eq!(piece, rows(&tokens(300, 1), &(128..192)));
}

#[test]
fn a_state_that_is_not_cut_stays_a_file() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("flat.kvs");
    let (mover, spec) = (
        mover(true, Durability::Process),
        common::spec("w").namespace,
    );
    let prompt = tokens(10, 1);
    let state = [("state".to_owned(), Buffer::from_vec(vec![1; 9999]))];
    let none = BlockBuffers::default();
    save_file(&mover, &path, &checkpoint(&spec, &prompt), &none, &state).unwrap();
    let store = sessions(home.path());
    let refused = import(&store, &path).unwrap_err().to_string();
    assert!(refused.contains("cut by tokens"), "{refused}");
    assert!(store.list().is_empty());
}

/// Whoever has opened a file reads that one, however often it is replaced.
#[test]
fn readers_have_one_session_or_the_other_while_it_is_replaced() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("a.kvs");
    let mover = mover(true, Durability::Process);
    let spec = namespace("w");
    let parts: Vec<Parts> = (0..4)
        .map(|seed| Parts::new(seed, &[3 * MIB + seed as usize, 777], &[MIB]))
        .collect();
    let save = |parts: &Parts| {
        let prompt = parts.tokens();
        let (pieces, objects) = (parts.pieces(0), parts.objects(0));
        save_file(
            &mover,
            &path,
            &checkpoint(&spec, &prompt),
            &pieces,
            &objects,
        )
        .unwrap()
    };
    save(&parts[0]);
    let over = AtomicBool::new(false);
    let seen: Vec<usize> = std::thread::scope(|scope| {
        let readers = (0..2).map(|_| {
            scope.spawn(|| {
                let mut seen = 0;
                while !over.load(Ordering::Relaxed) {
                    let file = SessionFile::open(&mover, &path).unwrap();
                    let of = parts.iter().find(|one| one.tokens() == file.about().tokens);
                    assert_eq!(
                        of.unwrap().restore(&file),
                        (of.unwrap().tokens().len(), true)
                    );
                    seen += 1;
                }
                seen
            })
        });
        let readers: Vec<_> = readers.collect();
        for round in 0..40 {
            save(&parts[round % parts.len()]);
        }
        over.store(true, Ordering::Relaxed);
        readers.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert!(seen.iter().all(|count| *count > 0), "{seen:?}");
    assert_eq!(names(home.path()), ["a.kvs"]);
}

/// A process may write no file of more than 16 MiB: the system fails it in the middle.
#[test]
fn a_disk_that_is_full_in_the_middle_leaves_nothing() {
    let name = "one_file::a_disk_that_is_full_in_the_middle_leaves_nothing";
    if let Some(home) = std::env::var_os("KVDEPOT_TEST_FULL") {
        return save_beyond_the_limit(&PathBuf::from(home));
    }
    let home = tempfile::tempdir().unwrap();
    let script = "trap '' XFSZ; ulimit -f 16384; exec \"$0\" \"$@\"";
    let ended = std::process::Command::new("sh")
        .args(["-c", script])
        .arg(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture"])
        .env("KVDEPOT_TEST_FULL", home.path())
        .status();
    assert!(ended.unwrap().success());
    assert_eq!(names(home.path()), ["said"]);
}

fn save_beyond_the_limit(home: &Path) {
    let path = home.join("a.kvs");
    let (spec, prompt) = (namespace("w"), tokens(10, 1));
    let said = content(3, 20 * MIB);
    let mut failures = 0;
    for direct in [true, false] {
        let mover = mover(direct, Durability::Process);
        let state = [("state".to_owned(), Buffer::from_vec(said.clone()))];
        let saved = save_file(
            &mover,
            &path,
            &checkpoint(&spec, &prompt),
            &BlockBuffers::default(),
            &state,
        );
        assert!(matches!(saved, Err(Error::Io { .. })), "{saved:?}");
        let mut writer =
            SessionWriter::new(&mover, &path, &checkpoint(&spec, &prompt), None).unwrap();
        writer.begin(Member::Object("state".into())).unwrap();
        let ended = writer.write(&said).and_then(|()| writer.end().map(drop));
        let ended = ended.and_then(|()| writer.finish().map(drop));
        assert!(matches!(ended, Err(Error::Io { .. })), "{ended:?}");
        failures += 2;
        assert!(names(home).iter().all(|name| name == "said"));
    }
    std::fs::write(home.join("said"), failures.to_string()).unwrap();
}
