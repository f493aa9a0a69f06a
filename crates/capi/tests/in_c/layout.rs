//! The header and this crate say the same.

use std::mem::offset_of;

use crate::programs;
use kvdepot::{
    batch, blocks, catalogue, depot, digest, engine, guard, llama, memory, mover, policy, save,
    sessions, task, two_phase, upkeep,
};

macro_rules! laid {
    ($said:ident, $($type:ty as $name:literal { $($field:ident),* })*) => {$(
        $said.push(format!("{} {}", $name, size_of::<$type>()));
        $($said.push(format!(
            "{}.{} {}", $name, stringify!($field), offset_of!($type, $field)
        ));)*
    )*};
}

fn of_rust() -> Vec<String> {
    let mut said = Vec::new();
    laid!(said,
        depot::Setting as "kvd_option" { value }
        memory::Piece as "kvd_buffer" { len }
        memory::Block as "kvd_block" { pieces_len }
        [u8; 32] as "kvd_key" {}
        blocks::Space as "kvd_space" {
            model, dtype, block_tokens, weights, layout, group, world, hash, salt
        }
        save::Run as "kvd_run" { end }
        save::Object as "kvd_object" { bytes }
        save::Given as "kvd_checkpoint" {
            tokens, tokens_len, text, text_len, objects, objects_len, note, created, reason,
            context_tokens, exact, reserved
        }
        save::Saved as "kvd_saved" { cached_tokens, cache_write_tokens, bytes_written, id }
        sessions::Piece as "kvd_piece" { end, bytes }
        sessions::Named as "kvd_named" { bytes }
        sessions::About as "kvd_found_about" {
            id, tokens, tokens_len, text, text_len, pieces, pieces_len, objects, objects_len, note,
            context_tokens
        }
        sessions::Back as "kvd_restored" { cached_tokens, whole }
        upkeep::Row as "kvd_listed" { id, note, tokens, text_bytes, bytes, created, reason, bad }
        upkeep::Checked as "kvd_checked" { blocks, bytes, missing }
        policy::Given as "kvd_policy_settings" {
            disk_space, min_tokens, cold_max_tokens, continued_interval_tokens,
            boundary_trim_tokens, boundary_align_tokens, write_budget_hour, write_budget_day,
            fixed_bytes, token_bytes, saves_prefixes, writes_whole
        }
        policy::Due as "kvd_answer" { action, reason, save, tokens, base, bytes, declined }
        batch::Given as "kvd_request" { reserved, local, remote, offset, len }
        engine::About as "kvd_remote_about" { len, lasts_ms, rights, path }
        llama::About as "kvd_llama_about" {
            tokens, state_len, rest, rest_len, token_len, pieces_len, sequence, layers, transposed
        }
        two_phase::Place as "kvd_place" { placement, placement_len, tier, bytes, key }
        mover::Placed as "kvd_placement" { len }
        [u8; 16] as "kvd_sum" {}
        catalogue::Kept as "kvd_entry" {
            id, parent, tokens, bytes, hits, used_ms, reason, pins
        }
        guard::Status as "kvd_status" {}
    );
    for (name, number) in [
        ("KVD_VERSION", guard::VERSION),
        ("KVD_STATUS_BUG", guard::Status::Bug as u32),
        ("KVD_STATUS_NOT_WHOLE", guard::Status::NotWhole as u32),
        ("KVD_STATUS_ABORTED", guard::Status::Aborted as u32),
        ("KVD_OUTCOME_OTHER", task::Became::Other as u32),
        ("KVD_OUTCOME_DECLINED", task::Became::Declined as u32),
        ("KVD_ID_LEN", save::ID_LEN as u32),
        ("KVD_GET_PREFIX", blocks::GET_PREFIX),
        ("KVD_GET_STAGED", blocks::GET_STAGED),
        ("KVD_TRANSFER_CLOSED", batch::MOVED_LAST.into()),
        ("KVD_DIGEST_LEN", digest::DIGEST_LEN as u32),
        ("KVD_PIN_PREFIX", two_phase::PIN_PREFIX),
        ("KVD_RESERVE_PREFIX", two_phase::RESERVE_PREFIX),
        ("KVD_RESERVE_STRICT", two_phase::RESERVE_STRICT),
    ] {
        said.push(format!("{name} {number}"));
    }
    said
}

#[test]
fn structs_lie_in_c_as_they_do_in_rust() {
    let Some(program) = programs::build("tests/c/layout.c", programs::Link::Shared) else {
        return;
    };
    let said = programs::answer(&mut program.command());
    assert_eq!(said.lines().collect::<Vec<_>>(), of_rust());
}

/// The names of functions after each `before` in a text.
fn names(text: &str, before: &str) -> Vec<String> {
    let each = text.split(before).skip(1);
    let name = |rest: &str| {
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
        let end = end.unwrap_or(rest.len());
        let is_call = rest[end..].starts_with('(');
        is_call.then(|| format!("kvd_{}", &rest[..end]))
    };
    let mut names: Vec<String> = each.filter_map(name).collect();
    names.sort();
    names
}

/// Names of the functions that the header declares.
fn declared() -> Vec<String> {
    let header = std::fs::read_to_string(programs::root().join("include/kvdepot.h")).unwrap();
    // Comments name functions too, and have examples that call them.
    let code: String = header
        .split("/*")
        .enumerate()
        .map(|(at, text)| match (at, text.split_once("*/")) {
            (0, _) => text,
            (_, Some((_comment, code))) => code,
            (_, None) => panic!("a comment does not end: {text}"),
        })
        .collect();
    let declared = names(&code, " kvd_").into_iter();
    let mut declared: Vec<String> = declared.chain(names(&code, " *kvd_")).collect();
    declared.sort();
    declared
}

#[test]
fn the_installed_library_exports_what_is_declared_each_with_a_version() {
    let map = std::fs::read_to_string(programs::root().join("kvdepot.map")).unwrap();
    let mapped = map.lines().filter_map(|line| line.trim().strip_suffix(';'));
    let mapped: Vec<&str> = mapped.filter(|name| name.starts_with("kvd_")).collect();
    assert_eq!(mapped, declared());
    if !programs::has("gcc") || !programs::has("nm") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let library = directory.path().join(programs::SONAME);
    programs::link_versioned(&library);
    let mut command = std::process::Command::new("nm");
    command.args(["-D", "--defined-only"]).arg(&library);
    let listed = programs::answer(&mut command);
    let exported = listed.lines().filter(|line| line.contains(" T "));
    let exported: Vec<String> = exported
        .map(|line| line.rsplit(' ').next().unwrap().to_owned())
        .collect();
    let versioned: Vec<String> = mapped
        .iter()
        .map(|name| format!("{name}@@KVDEPOT_1.0"))
        .collect();
    assert_eq!(exported, versioned);
}

/// A handler of `SIGBUS` that was set would be at an address where nothing is any more.
#[test]
fn both_shared_libraries_stay_loaded() {
    if !programs::has("gcc") || !programs::has("readelf") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let installed = directory.path().join(programs::SONAME);
    programs::link_versioned(&installed);
    for library in [installed, programs::library("libkvdepot.so")] {
        let mut command = std::process::Command::new("readelf");
        let said = programs::answer(command.arg("--dynamic").arg(&library));
        assert!(said.contains("NODELETE"), "{}: {said}", library.display());
    }
}

#[test]
fn every_function_is_declared_and_every_declaration_is_one() {
    let root = programs::root();
    let mut code = String::new();
    for file in std::fs::read_dir(root.join("src")).unwrap() {
        code.push_str(&std::fs::read_to_string(file.unwrap().path()).unwrap());
    }
    let declared = declared();
    assert_eq!(declared, names(&code, "fn kvd_"));
    assert!(declared.len() > 40, "{declared:?}");
}

#[test]
fn the_header_is_c_and_cpp() {
    for (compiler, language, standard) in [("gcc", "c", "-std=c11"), ("g++", "c++", "-std=c++17")] {
        if !programs::has(compiler) {
            continue;
        }
        let mut command = std::process::Command::new(compiler);
        command.args([standard, "-x", language, "-fsyntax-only"]);
        command.args(programs::STRICT);
        command
            .arg("-include")
            .arg(programs::root().join("include/kvdepot.h"));
        programs::answer(command.arg("/dev/null"));
    }
}
