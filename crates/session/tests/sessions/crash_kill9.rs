//! `kill -9` at any moment of a save: what was acknowledged is there whole, what was not is there
//! whole or not at all, and what was written of it is not written again.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::{restore, save, spec};
use kvdepot_session::Sessions;
use kvdepot_store::Config;
use kvdepot_testkit::child::{self, Child};
use kvdepot_testkit::{Rng, rounds};
use serde_json::json;

/// What is acknowledged of a tier of files outlives a process.
fn open(home: &str) -> Sessions {
    let settings = json!({
        "socket": "off", "lanes": 1, "lock_wait": "5s", "lookup_timeout": "60s",
        "posix": {"path": Path::new(home).join("posix"), "capacity": "1GiB"},
    });
    let depot = kvdepot_service::open(&Config::new("Posix", &settings).unwrap()).unwrap();
    Sessions::open(depot, &spec("w")).unwrap()
}

/// The beginning of a conversation: all of them differ in their first token.
fn said(conversation: u32, count: usize) -> Vec<u32> {
    let each = (0..count as u32).map(|at| at * 7 % 1000);
    std::iter::once(conversation)
        .chain(each)
        .take(count)
        .collect()
}

/// Conversations that grow by unaligned steps, and now and then one that goes.
fn save_until_killed() {
    let sessions = open(&child::value("home"));
    let mut rng = Rng::new(child::value("seed").parse().unwrap());
    let first: u32 = child::value("first").parse().unwrap();
    child::say("open");
    for conversation in first.. {
        let mut count = 0;
        for _ in 0..4 {
            count += 1 + rng.below(200) as usize;
            child::say(&format!("save {conversation} {count}"));
            save(&sessions, &said(conversation, count));
            child::say(&format!("saved {conversation} {count}"));
        }
        if rng.once_in(3) {
            let found = sessions.lookup(&said(conversation, count), 1).unwrap();
            child::say(&format!("remove {conversation} {count}"));
            sessions.remove(found[0].id).unwrap();
        }
    }
}

#[test]
fn a_save_that_is_killed_leaves_a_session_or_none() {
    let name = "crash_kill9::a_save_that_is_killed_leaves_a_session_or_none";
    if child::role().is_some() {
        return save_until_killed();
    }
    let mut rng = Rng::for_test(name);
    let home = tempfile::tempdir().unwrap();
    let path = home.path().to_str().unwrap();
    // What was acknowledged, and whether it has begun to be removed.
    let mut all: HashMap<(u32, usize), bool> = HashMap::new();
    let (mut looked, mut again) = (0, 0);
    for round in 0..rounds(60) {
        let seed = rng.bits().to_string();
        let first = (round * 1000 + 1000).to_string();
        let values = [("home", path), ("seed", &seed), ("first", &first)];
        let mut writer = Child::start(name, "writer", &values);
        writer.expect("open");
        let (mut begun, mut new) = (None, Vec::new());
        let (saved, more) = (rng.below(4), rng.below(40_000));
        let waited = Instant::now();
        let mut heard = writer.wait_for("saved", saved);
        // Anywhere in the next save also where one takes longer: as long as those before.
        let each = waited.elapsed().as_micros() as u64 / saved.max(1);
        let more = more.max(rng.below(each + 1));
        std::thread::sleep(Duration::from_micros(more));
        heard.extend(writer.kill_and_rest());
        for line in heard {
            let words: Vec<&str> = line.split(' ').collect();
            let of = (words[1].parse().unwrap(), words[2].parse().unwrap());
            match words[0] {
                "save" => begun = Some(of),
                "saved" => {
                    begun = None;
                    all.insert(of, false);
                    new.push(of);
                }
                _ => {
                    all.insert(of, true);
                }
            }
        }
        let sessions = open(path);
        // Of this round, and of one before.
        let older: Vec<_> = all.keys().copied().collect();
        if !older.is_empty() {
            new.push(*rng.pick(&older));
        }
        for (conversation, count) in new {
            let tokens = said(conversation, count);
            let found = sessions.lookup(&tokens, 1).unwrap();
            let is_whole = found.first().is_some_and(|one| one.tokens == tokens);
            match all[&(conversation, count)] {
                false => assert!(is_whole, "conversation {conversation}, {count} tokens"),
                true if !is_whole => continue,
                true => {}
            }
            assert_eq!(restore(&sessions, &found[0]), (true, count));
            looked += 1;
        }
        if let Some((conversation, count)) = begun {
            let tokens = said(conversation, count);
            let there = sessions.lookup(&tokens, 1).unwrap();
            for found in &there {
                assert!(restore(&sessions, found).0);
            }
            let prefix = sessions.prefix(&tokens).unwrap();
            let saved = save(&sessions, &tokens);
            assert!(saved.cached_tokens >= prefix);
            again += usize::from(prefix > 0);
            all.insert((conversation, count), false);
            let found = sessions.lookup(&tokens, 1).unwrap();
            assert_eq!(restore(&sessions, &found[0]), (true, count));
        }
        sessions.depot().close();
    }
    assert!(looked > 60, "only {looked} sessions were looked at");
    assert!(again > 0, "no save was killed behind its first piece");
}
