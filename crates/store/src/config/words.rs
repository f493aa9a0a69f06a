//! What every reader of settings needs: mappings, and the word that was meant.

use std::sync::LazyLock;

use kvdepot_arena::Error;
use serde_json::{Map, Value};

/// A mapping of options; an empty one where nothing is given.
pub(super) fn object<'a>(field: &str, value: &'a Value) -> Result<&'a Map<String, Value>, Error> {
    static EMPTY: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);
    match value {
        Value::Null => Ok(&EMPTY),
        Value::Object(map) => Ok(map),
        other => Err(Error::config(field, other, "a mapping of options")),
    }
}

/// Returns the word in `known` that is most similar to `name`, and its edit distance.
///
/// Returns `None` if `known` is empty.
pub fn nearest<'a>(known: impl Iterator<Item = &'a str>, name: &str) -> Option<(&'a str, usize)> {
    let with_distance = known.map(|word| (word, distance(word, name)));
    with_distance.min_by_key(|(_, distance)| *distance)
}

/// Edit distance (Levenshtein), for the suggestion only.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let change = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row.last().copied().unwrap_or_default()
}
