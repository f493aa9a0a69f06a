//! Conversations of which each byte is known, and sessions of them: saved, asked for, brought back.
//!
//! An engine that computes in steps of its own has other last bits for the same tokens: a `way`. A
//! session's note says its [`Kind`], so that whoever finds it knows what one save of it has
//! written.

use std::ops::Range;

use kvdepot_session::{Checkpoint, Error, Found, Reason, Saved, Sessions, Spec};
use kvdepot_store::{BlockBuffers, Buffer, NamespaceSpec};
use kvdepot_testkit::Rng;
use kvdepot_testkit::bytes::content;

use crate::world::{Law, law};

/// Tokens of a piece.
pub const PIECE: usize = 8;
/// Bytes of a token's rows.
pub const ROW: usize = 100;
/// Kinds of saves.
pub const KINDS: u64 = 6;
/// Ways to compute.
const WAYS: u64 = 3;
/// Bytes of an object.
const OBJECT: usize = 300;

/// One of a few beginnings of a few lengths, and one of a few ends behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Talk {
    begin: u8,
    shared: u8,
    end: u8,
    own: u8,
}

impl Talk {
    pub fn draw(rng: &mut Rng) -> Talk {
        let mut one = |most| rng.below(most) as u8;
        Talk {
            begin: one(2),
            shared: one(4),
            end: one(3),
            own: one(4),
        }
    }

    pub fn tokens(self) -> Vec<u32> {
        let shared = [0, 8, 13, 24][usize::from(self.shared)];
        let own = [1, 4, 8, 15][usize::from(self.own)];
        let (begin, end) = (u32::from(self.begin), u32::from(self.end));
        let first = (0..shared).map(|at| begin * 1000 + at);
        first
            .chain((0..own).map(|at| 7000 + end * 100 + at))
            .collect()
    }

    /// What it is told to a process as.
    pub fn word(self) -> String {
        let Talk {
            begin,
            shared,
            end,
            own,
        } = self;
        format!("{begin}:{shared}:{end}:{own}")
    }

    pub fn of_word(word: &str) -> Talk {
        let all: Vec<u8> = word.split(':').map(|one| one.parse().unwrap()).collect();
        Talk {
            begin: all[0],
            shared: all[1],
            end: all[2],
            own: all[3],
        }
    }
}

/// What a save is like.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub way: u64,
    pub exact: bool,
    pub object: bool,
    pub text: bool,
}

/// The kind of that number.
pub fn kind(number: u64) -> Kind {
    Kind {
        way: number % WAYS,
        exact: number >= 4,
        object: number % 2 == 1,
        text: number.is_multiple_of(3),
    }
}

pub fn spec() -> Spec {
    Spec::new(NamespaceSpec {
        model: "m".into(),
        dtype: "f16".into(),
        block_tokens: PIECE as u64,
        ..NamespaceSpec::default()
    })
}

/// What is rendered: each token's number.
pub fn text(tokens: &[u32]) -> Vec<u8> {
    let words = tokens.iter().map(|token| format!("{token} "));
    words.collect::<String>().into_bytes()
}

fn seed(tokens: &[u32]) -> u64 {
    tokens.iter().fold(7_u64, |sum, token| {
        sum.wrapping_mul(31).wrapping_add(u64::from(*token) + 1)
    })
}

/// The rows of a run of tokens.
pub fn rows(tokens: &[u32], run: &Range<usize>, way: u64) -> Vec<u8> {
    let one = |at: usize| {
        let mut row = content(seed(&tokens[..=at]), ROW);
        row[0] ^= way as u8;
        row
    };
    run.clone().flat_map(one).collect()
}

/// The part of a checkpoint of this kind that does not grow.
fn object(tokens: &[u32], number: u64) -> Vec<u8> {
    content(seed(tokens) ^ number << 56, OBJECT)
}

/// Saves a conversation; `meanwhile` happens when its rows are asked for.
pub fn save(
    store: &Sessions,
    tokens: &[u32],
    (number, created): (u64, u64),
    meanwhile: impl FnOnce(),
) -> Result<Saved, Error> {
    let Kind {
        way,
        exact,
        object: has_object,
        text: has_text,
    } = kind(number);
    let objects = match has_object {
        true => vec![(
            "window".to_owned(),
            Buffer::from_vec(object(tokens, number)),
        )],
        false => Vec::new(),
    };
    let rendered = text(tokens);
    let checkpoint = Checkpoint {
        tokens,
        text: if has_text { &rendered } else { b"" },
        reason: Reason::Asked,
        context_tokens: 0,
        objects,
        note: number.to_string(),
        created,
        exact,
    };
    let asked = |runs: &[Range<usize>]| {
        meanwhile();
        let each = runs
            .iter()
            .map(|run| Buffer::from_vec(rows(tokens, run, way)));
        Ok(BlockBuffers::whole(each))
    };
    store.save(checkpoint, Box::new(asked))
}

/// A session that was found, and what of it has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Come {
    pub id: String,
    pub tokens: usize,
    pub kind: u64,
    pub whole: bool,
}

/// Brings a session back. What comes is what was written.
pub fn bring(store: &Sessions, found: &Found) -> Law<Result<Come, Error>> {
    let buffer = |len: u64| Buffer::from_vec(vec![0xEE; len as usize]);
    let pieces: Vec<Buffer> = found.pieces.iter().map(|(_, len)| buffer(*len)).collect();
    let objects: Vec<Buffer> = found.objects.iter().map(|one| buffer(one.bytes)).collect();
    let into = |all: &[Buffer]| BlockBuffers::whole(all.iter().cloned());
    let restored = match store.restore(found, into(&pieces), into(&objects)) {
        Ok(restored) => restored,
        Err(error) => return Ok(Err(error)),
    };
    let count = found.tokens.len();
    let number: u64 = found.note().parse().map_err(|_| {
        let note = found.note();
        format!("WRONG BYTES: a note that nobody wrote: {note}")
    })?;
    let of = kind(number);
    let mut end = 0;
    for ((run, _), piece) in found.pieces.iter().zip(&pieces) {
        if run.end > restored.cached_tokens {
            break;
        }
        end = run.end;
        let piece = piece.to_vec();
        let mut ways = (0..WAYS).filter(|way| !of.exact || *way == of.way);
        law!(
            ways.any(|way| piece == rows(&found.tokens, run, way)),
            "WRONG BYTES: {run:?} of {count} tokens, kind {number}"
        );
    }
    law!(
        end == restored.cached_tokens && (!restored.whole || end == count),
        "{restored:?} of {count} tokens"
    );
    if restored.whole {
        let right: Vec<Vec<u8>> = match of.object {
            true => vec![object(&found.tokens, number)],
            false => Vec::new(),
        };
        let have: Vec<Vec<u8>> = objects.iter().map(Buffer::to_vec).collect();
        law!(have == right, "WRONG BYTES: an object of kind {number}");
    }
    Ok(Ok(Come {
        id: found.id.to_string(),
        tokens: count,
        kind: number,
        whole: restored.whole,
    }))
}

/// What is found of a prompt, the longest first, and what comes of it.
pub fn ask(store: &Sessions, prompt: &[u32], by_text: bool) -> Law<Result<Vec<Come>, Error>> {
    let rendered = text(prompt);
    let found = match by_text {
        true => store.lookup_text(&rendered, 4),
        false => store.lookup(prompt, 4),
    };
    let found = match found {
        Ok(found) => found,
        Err(error) => return Ok(Err(error)),
    };
    law!(
        found.is_sorted_by(|one, next| one.tokens.len() >= next.tokens.len()),
        "not the longest first"
    );
    let mut all = Vec::new();
    for one in &found {
        law!(
            prompt.starts_with(&one.tokens),
            "another beginning was found"
        );
        let len = text(&one.tokens).len();
        law!(
            !by_text || one.text_bytes == len && one.text() == &rendered[..len],
            "another text was found"
        );
        match bring(store, one)? {
            Ok(come) => all.push(come),
            Err(error) => return Ok(Err(error)),
        }
    }
    Ok(Ok(all))
}

/// Whether a save has failed as it may where something has no room or is not there.
pub fn is_not_stored(error: &Error) -> bool {
    matches!(error, Error::NotStored { .. })
}

/// Whether a session has gone since it was listed, in part or whole.
pub fn is_gone(error: &Error) -> bool {
    matches!(error, Error::Unknown(_) | Error::Malformed { .. })
}
