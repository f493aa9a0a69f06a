//! Options as a command line and a C program give them: a name with its section, and a text.

use serde_json::{Map, Value};

use crate::option::Kind;

/// Parses the value of option `name`, as given on a command line.
///
/// Returns a number or a flag if the text is one, and a text otherwise. If the schema requires a
/// text, the result is always a text.
#[must_use]
pub fn value_of(name: &str, value: &str) -> Value {
    let (section, option) = name.split_once('.').unwrap_or(("", name));
    let kind = super::schema::find(section, option).map(|spec| spec.kind);
    match (kind, value) {
        (Some(Kind::Text | Kind::Mode), _) => value.into(),
        (_, "true") => true.into(),
        (_, "false") => false.into(),
        _ => value
            .parse::<u64>()
            .map_or_else(|_| value.into(), Value::from),
    }
}

/// Sets `section.name` or `name` in `all`.
///
/// A value in the place of the section stays; the schema rejects it later.
pub fn set(all: &mut Value, name: &str, value: Value) {
    let (section, name) = match name.split_once('.') {
        Some((section, name)) => (Some(section), name),
        None => (None, name),
    };
    let Some(all) = all.as_object_mut() else {
        return;
    };
    let into = match section {
        None => Some(all),
        Some(section) => {
            let inner = all
                .entry(section)
                .or_insert_with(|| Value::Object(Map::new()));
            inner.as_object_mut()
        }
    };
    if let Some(into) = into {
        into.insert(name.to_owned(), value);
    }
}
