//! Depots of sessions, and states of which each byte is known.

#![allow(dead_code, reason = "each test uses some of it")]

use std::ops::Range;
use std::path::Path;

use kvdepot_session::{Checkpoint, Error, Found, Reason, Saved, Sessions, Spec};
use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, NamespaceSpec};
use kvdepot_testkit::bytes::content;
use serde_json::json;

pub(crate) const PIECE: usize = 64;
/// Bytes of a token's rows.
pub(crate) const ROW: usize = 100;

pub(crate) fn depot(home: &Path) -> Depot {
    let settings = json!({
        // A lookup may take longer than a machine stands still.
        "socket": "off", "lanes": 1, "lookup_timeout": "60s", "cache": {"capacity": "16MiB"},
        "posix": {"path": home.join("posix"), "capacity": "256MiB"},
    });
    kvdepot_service::open(&Config::new("Cache|Posix", &settings).unwrap()).unwrap()
}

pub(crate) fn spec(weights: &str) -> Spec {
    Spec::new(NamespaceSpec {
        model: "m".into(),
        dtype: "f16".into(),
        block_tokens: PIECE as u64,
        weights: Some(weights.into()),
        ..NamespaceSpec::default()
    })
}

pub(crate) fn sessions(home: &Path) -> Sessions {
    Sessions::open(depot(home), &spec("w")).unwrap()
}

/// The rows of a run of tokens: what an engine would have for these tokens and all before.
pub(crate) fn rows(tokens: &[u32], run: &Range<usize>) -> Vec<u8> {
    let one = |at: usize| {
        let seed = tokens[..=at].iter().fold(7_u64, |sum, token| {
            sum.wrapping_mul(31).wrapping_add(u64::from(*token) + 1)
        });
        content(seed, ROW)
    };
    run.clone().flat_map(one).collect()
}

pub(crate) fn save_with(
    sessions: &Sessions,
    tokens: &[u32],
    text: &str,
    objects: Vec<(String, Buffer)>,
) -> Result<Saved, Error> {
    let checkpoint = Checkpoint {
        tokens,
        text: text.as_bytes(),
        reason: Reason::Asked,
        context_tokens: 4096,
        objects,
        note: String::new(),
        created: 1_700_000_000 + tokens.len() as u64,
        exact: false,
    };
    sessions.save(
        checkpoint,
        Box::new(|runs| {
            let each = runs.iter().map(|run| Buffer::from_vec(rows(tokens, run)));
            Ok(BlockBuffers::whole(each))
        }),
    )
}

pub(crate) fn save(sessions: &Sessions, tokens: &[u32]) -> Saved {
    let logits = Buffer::from_vec(content(tokens.len() as u64, 500));
    save_with(sessions, tokens, "", vec![("logits".into(), logits)]).unwrap()
}

/// Brings a session back; whether it is whole. What has come is right.
pub(crate) fn restore(sessions: &Sessions, found: &Found) -> (bool, usize) {
    let buffer = |bytes: u64| Buffer::from_vec(vec![0xEE; bytes as usize]);
    let pieces: Vec<Buffer> = found
        .pieces
        .iter()
        .map(|(_, bytes)| buffer(*bytes))
        .collect();
    let objects: Vec<Buffer> = found.objects.iter().map(|one| buffer(one.bytes)).collect();
    let restored = sessions
        .restore(
            found,
            BlockBuffers::whole(pieces.clone()),
            BlockBuffers::whole(objects.clone()),
        )
        .unwrap();
    for ((run, _), piece) in found.pieces.iter().zip(&pieces) {
        if run.end <= restored.cached_tokens {
            assert_eq!(piece.to_vec(), rows(&found.tokens, run));
        }
    }
    if restored.whole {
        for object in &objects {
            assert_eq!(object.to_vec(), content(found.tokens.len() as u64, 500));
        }
    }
    (restored.whole, restored.cached_tokens)
}

pub(crate) fn tokens(count: usize, last: u32) -> Vec<u32> {
    let mut tokens: Vec<u32> = (0..count as u32).map(|at| at * 7 % 1000).collect();
    tokens[count - 1] = last;
    tokens
}

pub(crate) fn longest(sessions: &Sessions, tokens: &[u32]) -> Option<Found> {
    sessions.lookup(tokens, 1).unwrap().pop()
}

/// Sessions of a tier of files alone, as another process has them.
pub(crate) fn of_files(home: &Path) -> Sessions {
    let posix = json!({"path": home.join("posix"), "capacity": "256MiB"});
    let settings = json!({"socket": "off", "lanes": 1, "lookup_timeout": "60s", "posix": posix});
    let depot = kvdepot_service::open(&Config::new("Posix", &settings).unwrap()).unwrap();
    Sessions::open(depot, &spec("w")).unwrap()
}

/// Files of blocks.
pub(crate) fn blocks(home: &Path) -> usize {
    let folders = std::fs::read_dir(home.join("posix/blocks")).unwrap();
    let count = |folder: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_dir(folder.unwrap().path()).unwrap().count()
    };
    folders.map(count).sum()
}
