//! House rules: what the tree promises about itself, checked over its files.
//!
//! Each rule is a function from the tree to its offences, and has a canary: a small invented file
//! that must offend it, so that a rule that has stopped looking fails.

#![expect(
    clippy::unwrap_used,
    reason = "a test may stop where the tree cannot be read"
)]

mod mutants;
mod pages;
mod real_time;
mod rooms;
mod tree;
mod words;

use std::path::Path;
use std::process::{Command, Stdio};

use kvdepot_dev::root;

use tree::{File, holds, notices};

/// Longest source file: more has two jobs.
const LINES_MAX: usize = 600;
/// Longest line, as in rustfmt.toml.
const COLUMNS_MAX: usize = 100;
/// Crates that may use `unsafe`, in blocks with their reasons.
const UNSAFE: [&str; 6] = [
    "crates/host",
    "crates/media",
    "crates/transfer",
    "crates/capi",
    "crates/python",
    "crates/peers",
];

fn files_are_short(files: &[File]) -> Vec<String> {
    files
        .iter()
        .filter(|file| !file.is_test() && (file.is_rust() || file.path.ends_with(".py")))
        .map(|file| (file, file.code().lines().count()))
        .filter(|(_, lines)| *lines > LINES_MAX)
        .map(|(file, lines)| format!("{}: {lines} lines, at most {LINES_MAX}", file.path))
        .collect()
}

#[test]
fn no_file_is_over_600_lines() {
    holds(files_are_short);
    notices(
        files_are_short,
        &[File::new("crates/a/src/a.rs", &"// x\n".repeat(601))],
    );
    let tested = format!(
        "// x\n#[cfg(test)]\nmod tests {{\n{}}}\n",
        "// y\n".repeat(700)
    );
    assert!(files_are_short(&[File::new("crates/a/src/a.rs", &tested)]).is_empty());
}

/// The crates that ship, in the order in which they may use each other: only what stands before.
/// `alloc` and `plan` use none.
const ORDER: [&str; 12] = [
    "alloc", "plan", "host", "media", "arena", "store", "service", "session", "transfer", "capi",
    "cli", "python",
];

fn crates_use_those_before(files: &[File]) -> Vec<String> {
    let rank = |name: &str| ORDER.iter().position(|one| *one == name);
    let mut offences = Vec::new();
    for file in files {
        let name = file.path.strip_prefix("crates/");
        let Some(own) = name.and_then(|name| rank(name.strip_suffix("/Cargo.toml")?)) else {
            continue;
        };
        // What only tests use may be anything.
        let shipped = file
            .text
            .split("\n[dev-dependencies]")
            .next()
            .unwrap_or_default();
        for line in shipped.lines() {
            let other = line.strip_prefix("kvdepot-").map(|line| {
                let end = line
                    .find(|c: char| !c.is_alphanumeric())
                    .unwrap_or(line.len());
                &line[..end]
            });
            if other
                .and_then(rank)
                .is_some_and(|other| other >= own || own < 2)
            {
                offences.push(format!("{}: {line}: runs up", file.path));
            }
        }
    }
    offences
}

#[test]
fn crates_use_only_those_before_them() {
    holds(crates_use_those_before);
    let canary = |path: &str| File::new(path, "[dependencies]\nkvdepot-media.workspace = true\n");
    notices(crates_use_those_before, &[canary("crates/host/Cargo.toml")]);
    notices(crates_use_those_before, &[canary("crates/plan/Cargo.toml")]);
    assert!(crates_use_those_before(&[canary("crates/store/Cargo.toml")]).is_empty());
}

fn lines_are_short(files: &[File]) -> Vec<String> {
    let mut offences = Vec::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        for (number, line) in file.lines() {
            // A string or an address in a comment cannot always be broken.
            let excepted = line.contains('"') || line.contains("://");
            if line.chars().count() > COLUMNS_MAX && !excepted {
                offences.push(format!(
                    "{}:{number}: over {COLUMNS_MAX} columns",
                    file.path
                ));
            }
        }
    }
    offences
}

#[test]
fn no_line_is_over_100_columns() {
    holds(lines_are_short);
    notices(
        lines_are_short,
        &[File::new("crates/a/src/a.rs", &"x".repeat(101))],
    );
}

fn nothing_is_left_for_later(files: &[File]) -> Vec<String> {
    // Written in pieces, so that this file does not offend its own rule.
    let words = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("XX", "X"),
    ];
    let places = [concat!("/wo", "rk/"), concat!("/tmp/sp", "ec")];
    let mut offences = Vec::new();
    for file in files {
        for (number, line) in file.lines() {
            let has_word = line
                .split(|c: char| !c.is_alphanumeric() && c != '_')
                .any(|word| words.contains(&word));
            if has_word || places.iter().any(|place| line.contains(place)) {
                offences.push(format!("{}:{number}: {}", file.path, line.trim()));
            }
        }
    }
    offences
}

#[test]
fn no_notes_to_self_and_no_paths_of_one_machine() {
    holds(nothing_is_left_for_later);
    for line in [concat!("// TO", "DO: later"), concat!("cd /wo", "rk/main")] {
        notices(nothing_is_left_for_later, &[File::new("a.md", line)]);
    }
}

fn names_say_the_job(files: &[File]) -> Vec<String> {
    let vague = ["utils", "util", "helpers", "helper", "misc", "common"];
    files
        .iter()
        .filter(|file| file.is_rust() || file.path.ends_with(".py"))
        .filter(|file| {
            let stem = Path::new(&file.path)
                .file_stem()
                .unwrap_or_default()
                .to_string_lossy();
            // Shared code of one crate's tests is `tests/common/` by Cargo's convention.
            vague.contains(&stem.as_ref()) && !file.is_test()
        })
        .map(|file| format!("{}: the name says no job", file.path))
        .collect()
}

#[test]
fn no_file_is_named_utils() {
    holds(names_say_the_job);
    notices(names_say_the_job, &[File::new("crates/a/src/utils.rs", "")]);
}

fn crates_introduce_themselves(files: &[File]) -> Vec<String> {
    files
        .iter()
        .filter(|file| file.path.starts_with("crates/") && !file.is_test())
        .filter(|file| file.path.ends_with("src/lib.rs") || file.path.ends_with("src/main.rs"))
        .filter(|file| !file.text.starts_with("//! "))
        .map(|file| format!("{}: begins without a module doc", file.path))
        .collect()
}

#[test]
fn every_crate_has_a_module_doc() {
    holds(crates_introduce_themselves);
    notices(
        crates_introduce_themselves,
        &[File::new("crates/a/src/lib.rs", "mod a;\n")],
    );
}

fn unsafe_is_confined(files: &[File]) -> Vec<String> {
    files
        .iter()
        .filter(|file| file.path.starts_with("crates/") && file.path.ends_with("/src/lib.rs"))
        .filter(|file| !UNSAFE.iter().any(|allowed| file.path.starts_with(allowed)))
        .filter(|file| !file.text.contains("#![forbid(unsafe_code)]"))
        .map(|file| format!("{}: lacks #![forbid(unsafe_code)]", file.path))
        .collect()
}

#[test]
fn unsafe_code_is_confined() {
    holds(unsafe_is_confined);
    notices(
        unsafe_is_confined,
        &[File::new("crates/a/src/lib.rs", "//! A.\n")],
    );
}

/// Cargo looks for examples in a crate's documentation for seconds, also where there are none.
fn examples_are_run(files: &[File]) -> Vec<String> {
    let is_off = |file: &File| {
        let folder = file.path.split("/src/").next().unwrap_or_default();
        let manifest = format!("{folder}/Cargo.toml");
        let mut manifests = files.iter().filter(|other| other.path == manifest);
        manifests.any(|manifest| manifest.text.contains("doctest = false"))
    };
    let has_example = |file: &&File| {
        let docs = file.text.lines().filter_map(|line| {
            let line = line.trim_start();
            line.strip_prefix("///")
                .or_else(|| line.strip_prefix("//!"))
        });
        let fences = docs.filter_map(|line| line.trim_start().strip_prefix("```"));
        fences.step_by(2).any(|language| language != "text")
    };
    let sources = files
        .iter()
        .filter(|file| file.is_rust() && file.path.contains("/src/"));
    let offences = sources.filter(has_example).filter(|file| is_off(file));
    offences
        .map(|file| format!("{}: its crate has `doctest = false`", file.path))
        .collect()
}

#[test]
fn examples_in_documentation_are_run() {
    holds(examples_are_run);
    let manifest = File::new("crates/a/Cargo.toml", "[lib]\ndoctest = false\n");
    let source = File::new("crates/a/src/a.rs", "/// ```\n/// f();\n/// ```\n");
    notices(examples_are_run, &[manifest, source]);
}

/// Names in a table of a Cargo.toml, without the workspace's own crates.
fn dependencies<'a>(manifest: &'a str, table: &str) -> Vec<&'a str> {
    let inside = |line: &&str| !line.starts_with('[');
    manifest
        .lines()
        .skip_while(|line| line.trim() != table)
        .skip(1)
        .take_while(inside)
        .filter_map(|line| line.split_once(['=', '.']))
        .map(|(name, _)| name.trim())
        .filter(|name| !name.starts_with('#') && !name.starts_with("kvdepot-"))
        .collect()
}

fn dependencies_are_justified(files: &[File]) -> Vec<String> {
    let find = |path: &str| {
        files
            .iter()
            .find(|file| file.path == path)
            .map(|file| &*file.text)
    };
    let (Some(manifest), Some(page)) = (find("Cargo.toml"), find("docs/dependencies.md")) else {
        return vec!["Cargo.toml or docs/dependencies.md is missing".to_owned()];
    };
    let used = dependencies(manifest, "[workspace.dependencies]");
    let rows: Vec<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(name, _)| name)
        .collect();
    let unexplained = used
        .iter()
        .filter(|name| !rows.contains(name))
        .map(|name| format!("docs/dependencies.md: no row for {name}"));
    let unused = rows
        .iter()
        .filter(|name| !used.contains(name))
        .map(|name| format!("docs/dependencies.md: {name} is no dependency any more"));
    unexplained.chain(unused).collect()
}

#[test]
fn every_dependency_has_its_reason() {
    holds(dependencies_are_justified);
    let manifest = File::new("Cargo.toml", "[workspace.dependencies]\nserde = \"1\"\n");
    notices(
        dependencies_are_justified,
        &[manifest, File::new("docs/dependencies.md", "")],
    );
}

fn versions_stand_in_one_place(files: &[File]) -> Vec<String> {
    let mut offences = Vec::new();
    let manifests = files
        .iter()
        .filter(|file| file.path.starts_with("crates/") && file.path.ends_with("/Cargo.toml"));
    for file in manifests {
        let mut in_dependencies = false;
        for (number, line) in file.lines() {
            if line.starts_with('[') {
                in_dependencies = line.ends_with("dependencies]");
            } else if in_dependencies && line.contains('=') && !line.contains("workspace = true") {
                offences.push(format!(
                    "{}:{number}: {line}: not from the workspace",
                    file.path
                ));
            }
        }
    }
    offences
}

#[test]
fn crates_take_their_dependencies_from_the_workspace() {
    holds(versions_stand_in_one_place);
    let manifest = File::new("crates/a/Cargo.toml", "[dependencies]\nserde = \"1\"\n");
    notices(versions_stand_in_one_place, &[manifest]);
}

/// Targets of the links in a Markdown text, without their fragments.
fn links(text: &str) -> impl Iterator<Item = &str> {
    anchored(text).map(|(target, _)| target)
}

/// Links, each with the heading that it leads to, if it names one.
fn anchored(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'))
        .map(|(target, _)| target.split_once('#').unwrap_or((target, "")))
}

/// What links to a heading name it by.
fn anchor(heading: &str) -> String {
    let kept = heading.trim_start_matches('#').trim().chars();
    let kept = kept.filter(|one| one.is_alphanumeric() || [' ', '-', '_'].contains(one));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

/// A link's target as a path from the root of the tree.
fn resolve(from: &str, target: &str) -> String {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    parts.join("/")
}

fn pages_are_linked(files: &[File]) -> Vec<String> {
    let linked: Vec<String> = files
        .iter()
        .filter(|file| ["README.md", "docs/README.md"].contains(&&*file.path))
        .flat_map(|file| links(&file.text).map(|target| resolve(&file.path, target)))
        .collect();
    files
        .iter()
        .filter(|file| file.path.starts_with("docs/") && file.path.ends_with(".md"))
        .filter(|file| file.path != "docs/README.md" && !linked.contains(&file.path))
        .map(|file| format!("{}: no link from README.md or docs/README.md", file.path))
        .collect()
}

#[test]
fn every_page_is_linked() {
    holds(pages_are_linked);
    notices(pages_are_linked, &[File::new("docs/lost.md", "# Lost\n")]);
}

fn links_lead_somewhere(files: &[File]) -> Vec<String> {
    let mut offences = Vec::new();
    for file in files.iter().filter(|file| file.path.ends_with(".md")) {
        for (target, heading) in anchored(&file.text) {
            let path = match target {
                "" => file.path.clone(),
                _ => resolve(&file.path, target),
            };
            if target.contains("://") {
                continue;
            }
            if !target.is_empty() && !root().join(&path).exists() {
                offences.push(format!("{}: {target} does not exist", file.path));
            }
            let page = files.iter().find(|page| page.path == path);
            let is_there = |page: &File| {
                let mut headings = page.text.lines().filter(|line| line.starts_with('#'));
                headings.any(|line| anchor(line) == heading)
            };
            if !heading.is_empty() && page.is_some_and(|page| !is_there(page)) {
                offences.push(format!("{}: {path} has no #{heading}", file.path));
            }
        }
    }
    offences
}

#[test]
fn every_link_leads_somewhere() {
    holds(links_lead_somewhere);
    notices(links_lead_somewhere, &[File::new("docs/a.md", "[b](b.md)")]);
    let page = "# One `thing`\n\n[here](#one-thing) and [nowhere](#another)";
    notices(links_lead_somewhere, &[File::new("docs/a.md", page)]);
    let page = page.replace(" and [nowhere](#another)", "");
    assert!(links_lead_somewhere(&[File::new("docs/a.md", &page)]).is_empty());
}

#[test]
fn generated_files_are_current() {
    for page in kvdepot_dev::generate::PAGES {
        let verdict = page.check(root()).unwrap();
        assert_eq!(
            verdict,
            kvdepot_dev::generate::Verdict::Current,
            "{}: make docs",
            page.path
        );
    }
}

/// `make hooks` has git run it.
#[test]
fn the_hook_accepts_commit_messages_of_the_form_alone() {
    let message = tempfile::NamedTempFile::new().unwrap();
    let accepts = |subject: &str| {
        std::fs::write(message.path(), format!("{subject}\n\nWhy.\n")).unwrap();
        let mut hook = Command::new(root().join(".githooks/commit-msg"));
        hook.arg(message.path()).stderr(Stdio::null());
        hook.status().unwrap().success()
    };
    for subject in [
        "store: bound the queue",
        "store, cli: name the tier",
        "Merge x",
    ] {
        assert!(accepts(subject), "{subject}");
    }
    let long = format!("store: {}", "x".repeat(72));
    for subject in [
        "bound the queue",
        "Store: bound",
        "store: bounded.",
        "store:",
        &long,
    ] {
        assert!(!accepts(subject), "{subject}");
    }
}
