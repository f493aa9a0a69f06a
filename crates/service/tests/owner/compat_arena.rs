//! Arenas that earlier versions wrote: every later one opens them and serves each block byte for
//! byte, or refuses with a message that says what to do.
//!
//! `tests/fixtures/arena-N.runs` is the medium as an owner that was killed left it, packed by
//! `kvdepot_testkit::runs`; `arena-N.json` says what it holds. They are never written again. For
//! the files of a new format:
//!
//! ```text
//! KVDEPOT_FIXTURES=DIRECTORY cargo test -p kvdepot-service --test owner -- \
//!     --ignored compat_arena::
//! ```

use std::path::{Path, PathBuf};

use crate::common::{self, PATIENCE, Place, Served, key};
use kvdepot_service::Mover;
use kvdepot_store::inspect::Inspection;
use kvdepot_store::{BlockBuffers, Buffer, Depot, Key, NamespaceSpec};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::runs;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// The formats of which there are arenas.
const FORMATS: [u32; 1] = [1];

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn digest(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn unhex(text: &str) -> Key {
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    let bytes: Vec<u8> = (0..text.len()).step_by(2).map(byte).collect();
    Key(bytes.try_into().unwrap())
}

/// A namespace, as the manifest tells it.
fn spec(fields: &Value) -> NamespaceSpec {
    let text = |name: &str| fields[name].as_str().map(str::to_owned);
    NamespaceSpec {
        model: text("model").unwrap(),
        dtype: text("dtype").unwrap(),
        block_tokens: fields["block_tokens"].as_u64().unwrap(),
        weights: text("weights"),
        layout: text("layout"),
        group: text("group"),
        world: text("world"),
        hash: text("hash"),
        salt: text("salt"),
    }
}

/// What the manifest promises of one block.
struct Promise {
    fields: Value,
    key: Key,
    parts: Vec<(u64, String)>,
}

struct Fixture {
    place: Place,
    promises: Vec<Promise>,
    absent: Vec<(Value, Key)>,
}

fn fixture(format: u32) -> Fixture {
    let place = Place::new("Dax", "", "8MiB").without("dax", "capacity");
    let packed = std::fs::read(fixtures().join(format!("arena-{format}.runs"))).unwrap();
    runs::unpack(&packed, &place.arena());
    let manifest = std::fs::read(fixtures().join(format!("arena-{format}.json"))).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    let promise = |block: &Value| Promise {
        fields: block["namespace"].clone(),
        key: unhex(block["key"].as_str().unwrap()),
        parts: (block["parts"].as_array().unwrap().iter())
            .map(|part| {
                let sum = part["sha256"].as_str().unwrap().to_owned();
                (part["bytes"].as_u64().unwrap(), sum)
            })
            .collect(),
    };
    let absent = |block: &Value| {
        let key = unhex(block["key"].as_str().unwrap());
        (block["namespace"].clone(), key)
    };
    let list = |name: &str| manifest[name].as_array().unwrap().clone();
    Fixture {
        place,
        promises: list("blocks").iter().map(promise).collect(),
        absent: list("absent").iter().map(absent).collect(),
    }
}

/// Every block by `get` and, part by part, by a worker.
fn assert_served(depot: &Depot, mover: &Mover, promise: &Promise) {
    let ns = depot.namespace(&spec(&promise.fields)).unwrap();
    let name = hex(&promise.key.0);
    let len: u64 = promise.parts.iter().map(|(len, _)| len).sum();
    let whole = Buffer::from_vec(vec![0; len as usize]);
    let task = ns
        .get(vec![promise.key], BlockBuffers::whole([whole.clone()]))
        .unwrap();
    assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [true], "get {name}");
    let mut rest = &whole.to_vec()[..];
    let pins = ns.pin(&[promise.key], false).unwrap();
    let pin = pins[0].as_ref().unwrap();
    for (part, (len, sum)) in promise.parts.iter().enumerate() {
        let (now, later) = rest.split_at(*len as usize);
        assert_eq!(digest(now), *sum, "part {part} of {name}");
        rest = later;
        let alone = Buffer::from_vec(vec![0; *len as usize]);
        let job = mover
            .load(
                &[pin.placement()],
                &BlockBuffers::whole([alone.clone()]),
                part as u32,
            )
            .unwrap();
        assert!(job.wait(Some(PATIENCE)), "part {part} of {name}");
        assert_eq!(job.error(), None, "part {part} of {name}");
        assert_eq!(digest(&alone.to_vec()), *sum, "part {part} of {name}");
    }
    let pins: Vec<_> = pins.into_iter().flatten().collect();
    ns.unpin(&pins, true);
}

#[test]
fn every_block_of_an_earlier_arena_is_served() {
    for format in FORMATS {
        let fixture = fixture(format);
        let place = &fixture.place;
        let depot = match kvdepot_service::open(&place.config()) {
            Ok(depot) => depot,
            Err(error) => {
                // Refused, with the command that converts; nothing was changed.
                let text = error.to_string();
                assert!(text.contains("kvdepot "), "format {format}: {text}");
                continue;
            }
        };
        let mover = Mover::attach(&place.socket(), Some(1), false).unwrap();
        for promise in &fixture.promises {
            assert_served(&depot, &mover, promise);
        }
        for (fields, key) in &fixture.absent {
            let ns = depot.namespace(&spec(fields)).unwrap();
            assert_eq!(ns.contains(&[*key]).unwrap(), [false], "{}", hex(&key.0));
        }
        let blocks: u64 = (depot.namespaces().unwrap().iter())
            .map(|one| one.blocks)
            .sum();
        assert_eq!(blocks, fixture.promises.len() as u64);
        drop(mover);
        // It is written too: eviction, new blocks and another opening.
        let ns = depot.namespace(&spec(&fixture.promises[0].fields)).unwrap();
        for number in 9000..9400 {
            assert_eq!(common::put(&ns, &[number], 40_000), [true]);
        }
        assert!(common::has(&ns, &[9399], 40_000));
        common::assert_at_rest(&depot);
        drop(ns);
        depot.close();
        let verified = common::verify(&place.arena());
        assert!(verified.bad.is_empty() && verified.blocks > 0);
        let again = place.serve();
        let ns = again.namespace(&spec(&fixture.promises[0].fields)).unwrap();
        assert!(common::has(&ns, &[9399], 40_000));
    }
}

#[test]
fn a_tool_verifies_an_earlier_arena_without_changing_it() {
    for format in FORMATS {
        let fixture = fixture(format);
        let path = fixture.place.arena();
        let before = std::fs::read(&path).unwrap();
        match Inspection::open(&path) {
            Ok(_) => {
                let verified = common::verify(&path);
                assert_eq!(verified.blocks, fixture.promises.len() as u64);
                assert!(verified.bad.is_empty());
            }
            Err(error) => assert!(error.to_string().contains("kvdepot "), "{error}"),
        }
        assert!(std::fs::read(&path).unwrap() == before);
    }
}

// ---- how they are made ----------------------------------------------------------------------

struct Maker {
    depot: Depot,
    mover: Mover,
    blocks: Vec<Value>,
    absent: Vec<Value>,
}

impl Maker {
    /// Stores a block whose parts have these bytes.
    fn block(&mut self, fields: &Value, key: Key, parts: &[Vec<u8>]) {
        let ns = self.depot.namespace(&spec(fields)).unwrap();
        let lens = parts.iter().map(|part| part.len() as u64).collect();
        let reserved = ns.reserve_strict(&[(key, lens)]).unwrap();
        let reserved: Vec<_> = reserved.into_iter().flatten().collect();
        let mut sums = Vec::new();
        for (number, bytes) in parts.iter().enumerate() {
            let buffers = BlockBuffers::whole([Buffer::from_vec(bytes.clone())]);
            let job = self
                .mover
                .store(&[reserved[0].placement()], &buffers, number as u32)
                .unwrap();
            assert!(job.wait(Some(PATIENCE)));
            sums.push(job.checksums()[0].unwrap());
        }
        assert_eq!(ns.commit(&reserved, &[sums]).unwrap(), [true]);
        let part = |bytes: &Vec<u8>| json!({"bytes": bytes.len(), "sha256": digest(bytes)});
        self.blocks.push(json!({
            "namespace": fields,
            "key": hex(&key.0),
            "parts": parts.iter().map(part).collect::<Vec<_>>(),
        }));
    }

    fn remove(&mut self, fields: &Value, key: Key) {
        let ns = self.depot.namespace(&spec(fields)).unwrap();
        assert_eq!(ns.remove(&[key]).unwrap(), 1);
        let name = hex(&key.0);
        self.blocks.retain(|block| block["key"] != name.as_str());
        self.absent.push(json!({"namespace": fields, "key": name}));
    }

    fn free(&self) -> u64 {
        self.depot.stats().tiers[0].free_bytes
    }
}

/// `leaves` MiB and a little: each MiB a page of its own over and over, so that it packs well.
fn long(number: u64, leaves: u64) -> Vec<u8> {
    let leaf = |leaf| content(number * 100 + leaf, 4096).repeat(256);
    let mut bytes: Vec<u8> = (0..leaves).flat_map(leaf).collect();
    bytes.extend(content(number, 777));
    bytes
}

fn make(place: &Place) -> (Vec<Value>, Vec<Value>, Vec<u8>) {
    let depot = place.serve();
    let mover = Mover::attach(&place.socket(), Some(1), true).unwrap();
    let mut maker = Maker {
        depot,
        mover,
        blocks: Vec::new(),
        absent: Vec::new(),
    };
    let plain = json!({"model": "model-a", "dtype": "float32", "block_tokens": 16});
    let full = json!({
        "model": "org/model-b", "dtype": "bfloat16", "block_tokens": 256, "weights": "w1",
        "layout": "NHD 2x8x64", "group": "0", "world": "tp2 pp1", "hash": "sha256 seed 7",
        "salt": "tenant",
    });
    let unicode = json!({"model": "módel-c 模型", "dtype": "float16", "block_tokens": 1});
    for (number, len) in [1, 4095, 4096, 4097, 9000].into_iter().enumerate() {
        let number = number as u64;
        maker.block(&plain, key(number), &[content(number, len)]);
    }
    // The same key in another namespace, in two and in three parts.
    maker.block(&full, key(1), &[content(11, 5000), content(12, 3000)]);
    let three = [content(13, 1), content(14, 4096), content(15, 6001)];
    maker.block(&full, key(20), &three);
    maker.block(&unicode, key(1), &[long(7, 2)]);
    // Everything but little becomes full, and holes of a granule remain: blocks in extents.
    let mut filler = 1000;
    while maker.free() > 80 << 10 {
        let len = (maker.free() - (64 << 10)).min(1 << 20) as usize;
        maker.block(
            &plain,
            key(filler),
            &[content(filler, 4096).repeat(len / 4096)],
        );
        filler += 1;
    }
    let mut grains = Vec::new();
    while maker.free() > 0 {
        let number = filler + grains.len() as u64;
        maker.block(&plain, key(number), &[content(number, 4096)]);
        grains.push(key(number));
    }
    for grain in grains.iter().step_by(2) {
        maker.remove(&plain, *grain);
    }
    maker.block(&plain, key(30), &[content(30, 16_000)]);
    maker.block(&full, key(31), &[content(31, 4000), content(32, 3000)]);
    assert_eq!(maker.depot.stats().tiers[0].evicted_blocks, 0);
    // Written, and never committed.
    let ns = maker.depot.namespace(&spec(&plain)).unwrap();
    maker.remove(&plain, key(2));
    let reserved = ns.reserve_strict(&[(key(40), vec![4096])]).unwrap();
    let bytes = BlockBuffers::whole([Buffer::from_vec(content(40, 4096))]);
    let placement = reserved[0].as_ref().unwrap().placement();
    let job = maker.mover.store(&[placement], &bytes, 0).unwrap();
    assert!(job.wait(Some(PATIENCE)));
    maker
        .absent
        .push(json!({"namespace": plain, "key": hex(&key(40).0)}));
    // As `kill -9` leaves it.
    let packed = runs::pack(&place.arena());
    (maker.blocks, maker.absent, packed)
}

#[test]
#[ignore = "writes the fixtures of a format, once"]
fn make_the_fixtures_of_this_format() {
    let Some(folder) = std::env::var_os("KVDEPOT_FIXTURES").map(PathBuf::from) else {
        return;
    };
    let place = Place::new("Dax", "", "8MiB").with("dax", "records", 256);
    let (blocks, absent, packed) = make(&place);
    let raw = common::raw::Raw::open(&place.arena());
    let extents = raw.live(&key(30)).unwrap().1.extents.count();
    assert!(extents > 2, "{extents} extents");
    let manifest = json!({
        "made_by": format!("kvdepot {}", env!("CARGO_PKG_VERSION")),
        "blocks": blocks,
        "absent": absent,
    });
    let text = serde_json::to_string_pretty(&manifest).unwrap() + "\n";
    std::fs::write(folder.join("arena-1.json"), text).unwrap();
    std::fs::write(folder.join("arena-1.runs"), packed).unwrap();
}
