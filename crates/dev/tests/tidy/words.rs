//! Plain words: pages, doc comments, help and messages are read once.
//!
//! `docs/cli.md` and `docs/configuration.md` are generated from all help texts, and
//! `docs/troubleshooting.md` has every warning and error, so the rules of pages hold for them too.

use regex::Regex;

use crate::tree::{File, holds, notices};

/// Pictures, idioms and words with several meanings, for which the field has a standard term.
const BANNED: &[&str] = &[
    "anew",
    "any more",
    "as often as needed",
    "at so many",
    "bring(s)? near",
    "bur(y|ied|ial|ials)",
    "come(s)? near",
    "comes to nothing",
    "far tier",
    "find(s)? no room",
    "for want of",
    "give(s)? back",
    "given back",
    "goes on into",
    "has no room",
    "hears of",
    "homes",
    "in its place",
    "is told",
    "knock(s)?",
    "left alone",
    "let(s)? go of",
    "lies (at|in|beside|behind|below|there)",
    "meanwhile",
    "near tier",
    "nearer tier",
    "no room",
    "nobody",
    "not to be had",
    "on its way",
    "pass(es|ed)? by",
    "past the page cache",
    "rotten",
    "say(s)? so",
    "so many",
    "take(s)? leave",
    "taken back",
    "tiers? apart",
    "under way",
    "unless given",
    "whoever",
    "whomever",
];

/// Words that a page may have, so often. Numbers only go down.
const ALLOWED: &[(&str, usize)] = &[];

/// Longest sentence of a page, in words.
const WORDS_MAX: usize = 40;

/// Written for contributors, or in other words until their subject is rebuilt.
const OTHER_PAGES: [&str; 3] = [
    "docs/architecture.md",
    "docs/testing.md",
    "docs/design/testing.md",
];

fn is_page(file: &File) -> bool {
    let is_ours = file.path == "README.md" || file.path.starts_with("docs/");
    is_ours && file.path.ends_with(".md") && !OTHER_PAGES.contains(&file.path.as_str())
}

/// The lines of a page without its code blocks, inline code and comments.
fn prose(text: &str) -> Vec<(usize, String)> {
    let code = Regex::new(r"`[^`]*`|<!--.*?-->|\]\([^)]*\)").unwrap();
    let (mut lines, mut fenced) = (Vec::new(), false);
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            lines.push((number + 1, code.replace_all(line, "]").into_owned()));
        }
    }
    lines
}

fn no_banned_words(files: &[File]) -> Vec<String> {
    let banned = format!(r"(?i)\b({})\b", BANNED.join("|"));
    let banned = Regex::new(&banned).unwrap();
    let mut offences = Vec::new();
    for file in files.iter().filter(|file| is_page(file)) {
        let mut found = Vec::new();
        // Help texts are in code blocks there.
        let lines = match file.path.as_str() {
            "docs/cli.md" => file.lines().map(|(at, line)| (at, line.into())).collect(),
            _ => prose(&file.text),
        };
        for (number, line) in lines {
            let words = banned.find_iter(&line);
            found.extend(words.map(|word| format!("{}:{number}: {}", file.path, word.as_str())));
        }
        let allowed = ALLOWED.iter().find(|(path, _)| *path == file.path);
        let allowed = allowed.map_or(0, |(_, count)| *count);
        if found.len() > allowed {
            offences.extend(found);
        } else if found.len() < allowed {
            let count = found.len();
            offences.push(format!(
                "{}: allowed are {allowed} now, lower it to {count}",
                file.path
            ));
        }
    }
    offences
}

#[test]
fn pages_help_and_messages_have_no_banned_words() {
    holds(no_banned_words);
    let canary = "A block that finds\nno room there is told so; see `no room`.\n";
    notices(no_banned_words, &[File::new("docs/a.md", canary)]);
    notices(
        no_banned_words,
        &[File::new("docs/cli.md", "```text\nAll unless given\n```\n")],
    );
}

fn no_long_sentences(files: &[File]) -> Vec<String> {
    let item = Regex::new(r"^\s*([-*+]|\d+\.) ").unwrap();
    let end = Regex::new(r#"[.!?][")*]* "#).unwrap();
    let mut offences = Vec::new();
    for file in files.iter().filter(|file| is_page(file)) {
        let mut paragraphs: Vec<(usize, String)> = Vec::new();
        let mut open = false;
        for (number, line) in prose(&file.text) {
            let text = line.trim();
            let is_other = text.is_empty() || text.starts_with(['|', '#', '<', '!']);
            match (is_other, open && !item.is_match(&line)) {
                (true, _) => open = false,
                (false, true) => {
                    if let Some((_, paragraph)) = paragraphs.last_mut() {
                        *paragraph += " ";
                        *paragraph += text;
                    }
                }
                (false, false) => {
                    open = true;
                    paragraphs.push((number, text.to_owned()));
                }
            }
        }
        for (number, paragraph) in paragraphs {
            let long = end
                .split(&paragraph)
                .map(|one| one.split_whitespace().count());
            if let Some(words) = long.max().filter(|words| *words > WORDS_MAX) {
                offences.push(format!(
                    "{}:{number}: a sentence of {words} words",
                    file.path
                ));
            }
        }
    }
    offences
}

#[test]
fn sentences_of_pages_have_at_most_40_words() {
    holds(no_long_sentences);
    let canary = format!("First.\n\n- A list has {}\n  more.\n", "words ".repeat(40));
    notices(no_long_sentences, &[File::new("docs/a.md", &canary)]);
}

/// Crates whose items are documented for users.
const PUBLIC: [&str; 9] = [
    "alloc", "plan", "host", "media", "arena", "store", "service", "session", "transfer",
];

fn no_questions(files: &[File]) -> Vec<String> {
    let asks = Regex::new(r"^\s*///\s+(What|Who|Whom|Whose|How|Where|Whether|Which|When|Why)\b");
    let asks = asks.unwrap();
    let mut offences = Vec::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        let name = file.path.strip_prefix("crates/").unwrap_or_default();
        if !PUBLIC
            .iter()
            .any(|one| name.starts_with(&format!("{one}/src/")))
        {
            continue;
        }
        let lines: Vec<&str> = file.code().lines().collect();
        for (at, line) in lines.iter().enumerate() {
            let is_first = at == 0 || !lines[at - 1].trim_start().starts_with("///");
            if !is_first || !asks.is_match(line) {
                continue;
            }
            let mut after = lines[at..].iter().map(|line| line.trim_start());
            let item = after.find(|line| !line.starts_with("///") && !line.starts_with("#["));
            if item.is_some_and(|item| item.starts_with("pub ")) {
                offences.push(format!("{}:{}: {}", file.path, at + 1, line.trim()));
            }
        }
    }
    offences
}

#[test]
fn public_items_are_named_and_not_asked_for() {
    holds(no_questions);
    let canary = "/// How long it is.\n#[must_use]\npub fn len(&self) -> u64 {\n    0\n}\n";
    notices(no_questions, &[File::new("crates/store/src/a.rs", canary)]);
}
