//! The table of what the simulator catches, in the page about testing.

use std::collections::HashMap;
use std::fmt::Write;
use std::fs;
use std::io;
use std::path::Path;

use super::campaign::{self, Found};
use super::{Set, named};
use crate::generate::Verdict;

const PAGE: &str = "docs/testing.md";
const BEGIN: &str = "<!-- written by `kvdepot-dev mutants table` -->\n";
const END: &str = "<!-- the end of what it wrote -->\n";

/// The table, from the results alone.
///
/// # Errors
/// Mutations or results cannot be read.
pub fn table(root: &Path) -> io::Result<String> {
    let found = campaign::results(root)?;
    let whys: HashMap<String, String> = super::by_hand(root)?
        .into_iter()
        .map(|one| (one.id, one.why))
        .collect();
    let equivalents = super::equivalents(root)?;
    let mut rows: Vec<&Found> = found
        .values()
        .filter(|found| found.is_caught().is_some())
        .filter(|found| equivalents.iter().all(|one| one.id != found.id))
        .filter(|found| found.set != Set::Hand.name() || whys.contains_key(&found.id))
        .collect();
    rows.sort_by_key(|found| (found.set != Set::Hand.name(), found.id.clone()));
    let mut text = String::new();
    for set in [Set::Hand, Set::Drawn] {
        let all = rows.iter().filter(|row| row.set == set.name());
        let caught = all
            .clone()
            .filter(|row| row.is_caught() == Some(true))
            .count();
        let origin = match set {
            Set::Hand => "made by hand",
            Set::Drawn => "drawn",
        };
        let _ = writeln!(text, "{caught} of {} {origin} are caught.", all.count());
    }
    text.push_str(
        "\n| mutation | | seconds | what the simulator said |\n| --- | --- | ---: | --- |\n",
    );
    for row in rows {
        let what = match whys.get(&row.id) {
            Some(why) => format!("{}: {why}", row.id),
            None => row.id.clone(),
        };
        let outcome = match row.is_caught() {
            Some(true) => row.outcome.as_str(),
            _ => "**survived**",
        };
        let said = if row.is_caught() == Some(true) {
            row.said.as_str()
        } else {
            ""
        };
        let (what, said) = (cell(&what), cell(said));
        let _ = writeln!(text, "| {what} | {outcome} | {} | {said} |", row.seconds);
    }
    if !equivalents.is_empty() {
        text.push_str("\nDrawn, and replaced by the next, because they change nothing:\n\n");
        for one in equivalents {
            let _ = writeln!(text, "* {}: {}", cell(&one.id), one.why.trim());
        }
    }
    Ok(text)
}

/// Text that a table's cell can hold.
fn cell(text: &str) -> String {
    let short: String = text.chars().take(160).collect();
    format!("`{}`", short.replace('`', "'").replace('|', "\\|")).replace("``", "")
}

/// Writes the table into the page, or only says whether it is there.
///
/// # Errors
/// The page cannot be read or written, or has no place for it.
pub fn update(root: &Path, check: bool) -> io::Result<Verdict> {
    let path = root.join(PAGE);
    let page = fs::read_to_string(&path).map_err(named(&path))?;
    let place = || io::Error::other(format!("{PAGE} has no place for the table"));
    let (before, rest) = page.split_once(BEGIN).ok_or_else(place)?;
    let (_, after) = rest.split_once(END).ok_or_else(place)?;
    let wanted = format!("{before}{BEGIN}\n{}\n{END}{after}", table(root)?);
    if wanted == page {
        return Ok(Verdict::Current);
    }
    if !check {
        fs::write(&path, wanted).map_err(named(&path))?;
    }
    Ok(Verdict::Stale)
}
