//! The process of an engine with sessions: a client of an owner's depot, or the owner of one over
//! a directory that others have, too. It does what its command says, and answers in one line.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use kvdepot_session::{Error, Id, Sessions, export, import};
use kvdepot_store::{Depot, TierStats};

use super::words::{self, Talk};
use crate::common::config_of;
use crate::processes::players::{Player, number};
use crate::world::Law;

/// Longest wait for an owner.
const PATIENCE: Duration = Duration::from_secs(15);

/// A token that no talk has.
const NOBODYS: u32 = 999_999;

/// A client's timeout, its socket and that; or `own` and a configuration.
pub fn talker(role: &str) -> Player {
    let role = role.to_owned();
    let mut sessions = None;
    Box::new(move |words| {
        if words[0] == "open" {
            return match open(&role) {
                Ok(opened) => {
                    sessions = Some(opened);
                    "open".into()
                }
                Err(error) => said(&error),
            };
        }
        let store = sessions.as_ref().unwrap();
        match perform(store, words) {
            Ok(answer) => answer,
            Err(broken) => format!("WRONG {broken}"),
        }
    })
}

fn open(role: &str) -> Result<Sessions, Error> {
    let (kind, rest) = role.split_once(' ').unwrap();
    let depot = match kind {
        "own" => kvdepot_service::open(&config_of(rest))?,
        patience => {
            let patience = Some(Duration::from_millis(number(patience)));
            let socket = PathBuf::from(rest);
            kvdepot_service::connect_within(&socket, Some(2), patience)?
        }
    };
    Sessions::open(depot, &words::spec())
}

fn said(error: &Error) -> String {
    let kind = match error {
        _ if words::is_not_stored(error) => "not",
        _ if words::is_gone(error) => "gone",
        _ => "failed",
    };
    format!("{kind}: {error}").replace('\n', " ")
}

fn told<T>(result: Result<T, Error>, tell: impl FnOnce(T) -> String) -> String {
    match result {
        Ok(answer) => tell(answer),
        Err(error) => said(&error),
    }
}

fn perform(store: &Sessions, words: &[&str]) -> Law<String> {
    Ok(match words[0] {
        "save" => {
            let tokens = Talk::of_word(words[1]).tokens();
            let how = (number(words[2]), number(words[3]));
            let saved = words::save(store, &tokens, how, || ());
            if let Ok(saved) = &saved {
                let sum = saved.cached_tokens + saved.cache_write_tokens;
                crate::world::law!(sum == tokens.len(), "{saved:?} of {} tokens", tokens.len());
            }
            told(saved, |saved| format!("saved {}", saved.id))
        }
        "ask" => {
            let mut prompt = Talk::of_word(words[1]).tokens();
            prompt.extend(0..number(words[2]) as u32);
            if words[3] == "anew"
                && let Err(error) = store.refresh()
            {
                return Ok(said(&error));
            }
            told(words::ask(store, &prompt, words[4] == "text")?, |all| {
                let each = all.iter().map(|come| {
                    let whole = if come.whole { "whole" } else { "part" };
                    format!(" {}:{}:{}:{whole}", come.id, come.tokens, come.kind)
                });
                format!("asked{}", each.collect::<String>())
            })
        }
        "refresh" => told(store.refresh(), |()| "refreshed".into()),
        "remove" => match any(store, words[1]) {
            Some(id) => told(remove(store, id), |tokens| {
                format!("removed {id} {}", numbers(&tokens))
            }),
            None => "nothing".into(),
        },
        "verify" => told(verify(store), |missing| format!("verified {missing}")),
        "export" => match any(store, words[1]) {
            Some(id) => told(leave(store, id, words[2]), |(tokens, note)| {
                format!("exported {note} {}", numbers(&tokens))
            }),
            None => "nothing".into(),
        },
        "import" => told(import(store, words[1].as_ref()), |imported| {
            format!("saved {}", imported.id)
        }),
        "held" => {
            let stats = store.depot().stats();
            let held = |tier: &TierStats| tier.pinned_blocks + tier.reserved_blocks;
            let held: u64 = stats.tiers.iter().map(held).sum();
            format!("held {held} {}", stats.write_back_bytes)
        }
        "found" => {
            // Whether a connection has ended is known for certain once it is used.
            let begun = Instant::now();
            let is_found = || {
                let asked = store.prefix(&[NOBODYS]);
                asked.is_ok() && store.depot().is_connected()
            };
            while !is_found() && begun.elapsed() < PATIENCE {
                std::thread::sleep(Duration::from_millis(2));
            }
            format!("connected {}", store.depot().is_connected())
        }
        "close" => {
            Depot::close(store.depot());
            "closed".into()
        }
        other => format!("failed: what is {other}?"),
    })
}

fn any(store: &Sessions, which: &str) -> Option<Id> {
    let all = store.list();
    let which = number(which) as usize;
    (!all.is_empty()).then(|| all[which % all.len()].id)
}

fn remove(store: &Sessions, id: Id) -> Result<Vec<u32>, Error> {
    let tokens = store.manifest(id)?.tokens;
    store.remove(id)?;
    Ok(tokens)
}

fn verify(store: &Sessions) -> Result<usize, Error> {
    let mut missing = 0;
    for one in store.list() {
        match store.verify(one.id) {
            Ok(checked) => missing += checked.missing.len(),
            Err(error) if words::is_gone(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(missing)
}

fn leave(store: &Sessions, id: Id, path: &str) -> Result<(Vec<u32>, String), Error> {
    let manifest = store.manifest(id)?;
    export(store, id, path.as_ref())?;
    Ok((manifest.tokens, manifest.note))
}

/// Tokens, in a word.
fn numbers(tokens: &[u32]) -> String {
    let each: Vec<String> = tokens.iter().map(u32::to_string).collect();
    each.join(",")
}
