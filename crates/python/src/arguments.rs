//! Arguments of the verbs, read and checked: fields of a namespace, lengths, parts, checksums.

use std::borrow::Cow;

use kvdepot_session::PIECE_TOKENS_MAX;
use kvdepot_store::{Checksum, NamespaceSpec};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyString};

use crate::errors;
use crate::two_phase::Reservation;

/// The arguments of `Depot.namespace`.
pub(crate) struct Fields<'a, 'py> {
    pub(crate) model: &'a Bound<'py, PyAny>,
    pub(crate) dtype: &'a Bound<'py, PyAny>,
    pub(crate) block_tokens: &'a Bound<'py, PyAny>,
    pub(crate) weights: Option<&'a Bound<'py, PyAny>>,
    pub(crate) layout: Option<&'a Bound<'py, PyAny>>,
    pub(crate) group: Option<&'a Bound<'py, PyAny>>,
    pub(crate) world: Option<&'a Bound<'py, PyAny>>,
    pub(crate) hash: Option<&'a Bound<'py, PyAny>>,
    pub(crate) salt: Option<&'a Bound<'py, PyAny>>,
}

impl Fields<'_, '_> {
    /// The namespace that they describe.
    pub(crate) fn read(&self) -> PyResult<NamespaceSpec> {
        Ok(NamespaceSpec {
            model: word("model", self.model)?,
            dtype: word("dtype", self.dtype)?,
            block_tokens: number("block_tokens", self.block_tokens)?,
            weights: optional("weights", self.weights)?,
            layout: optional("layout", self.layout)?,
            group: optional("group", self.group)?,
            world: optional("world", self.world)?,
            hash: optional("hash", self.hash)?,
            salt: self.salt.map(salt).transpose()?,
        })
    }
}

/// Refuses what cannot be the tokens of a session's piece, by the name that it has there.
pub(crate) fn piece_tokens(value: &Bound<'_, PyAny>) -> PyResult<()> {
    let number = value.extract::<u64>().ok();
    if number.is_some_and(|number| (1..=u64::from(PIECE_TOKENS_MAX)).contains(&number)) {
        return Ok(());
    }
    let allowed = format!("a whole number from 1 to {PIECE_TOKENS_MAX}");
    let shown = errors::shown(value);
    Err(errors::input(value.py(), "piece_tokens", shown, allowed))
}

fn optional(field: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<String>> {
    value.map(|value| word(field, value)).transpose()
}

/// A salt, which may be a secret: an error does not show it.
fn salt(value: &Bound<'_, PyAny>) -> PyResult<String> {
    let allowed = "a string that UTF-8 can encode (no surrogates), bytes or an integer";
    word("salt", value).map_err(|_| errors::input(value.py(), "salt", "(not shown)", allowed))
}

/// A text; numbers and bytes are written as one.
fn word(field: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    if let Ok(text) = value.cast::<PyString>() {
        return self::text(field, text);
    }
    if let Ok(bytes) = value.cast::<PyBytes>() {
        let hex: String = bytes
            .as_bytes()
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        // No text begins like this by accident.
        return Ok(format!("\0bytes:{hex}"));
    }
    if value.is_exact_instance_of::<PyInt>() {
        return Ok(value.str()?.to_cow()?.into_owned());
    }
    let shown = errors::shown(value);
    Err(errors::input(
        value.py(),
        field,
        shown,
        "a string, bytes or an integer",
    ))
}

/// What a text of Python is to be, which can hold halves of characters too.
pub(crate) const TEXT: &str = "a string that UTF-8 can encode (no surrogates)";

/// A text.
pub(crate) fn text(field: &str, value: &Bound<'_, PyString>) -> PyResult<String> {
    let text = value.to_cow().map(Cow::into_owned);
    text.map_err(|_| errors::input(value.py(), field, errors::shown(value), TEXT))
}

/// A whole number of at least zero.
pub(crate) fn number(field: &str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    number_from(0, field, value)
}

/// A whole number of at least `least`.
pub(crate) fn number_from(least: u64, field: &str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    let number = value.extract::<u64>().ok();
    number.filter(|number| *number >= least).ok_or_else(|| {
        let allowed = format!("a whole number, {least} to 2^64 - 1");
        errors::input(value.py(), field, errors::shown(value), allowed)
    })
}

/// A whole number that may be too small or too large for what it counts.
pub(crate) fn whole<T: TryFrom<i128>>(
    py: Python<'_>,
    field: &str,
    value: i128,
    allowed: &str,
) -> PyResult<T> {
    T::try_from(value).map_err(|_| errors::input(py, field, value, allowed))
}

/// One length a key, of one number for all or a list.
pub(crate) fn lengths(lengths: &Bound<'_, PyAny>, count: usize) -> PyResult<Vec<u64>> {
    if lengths.is_instance_of::<PyInt>() {
        return Ok(vec![number("lengths", lengths)?; count]);
    }
    let mut each = Vec::with_capacity(count);
    let items = lengths.try_iter().map_err(|_| {
        let shown = errors::shown(lengths);
        errors::input(
            lengths.py(),
            "lengths",
            shown,
            "a number, or a sequence with one number per key",
        )
    })?;
    for (index, item) in items.enumerate() {
        each.push(number(&format!("lengths[{index}]"), &item?)?);
    }
    if each.len() != count {
        let value = format!("{} numbers for {count} keys", each.len());
        return Err(errors::input(
            lengths.py(),
            "lengths",
            value,
            "one number per key",
        ));
    }
    Ok(each)
}

/// How blocks are split into parts.
pub(crate) enum Split {
    /// Into so many of equal length.
    Equal(u64),
    /// Into these.
    Lengths(Vec<u64>),
}

/// How the blocks of a call are split.
pub(crate) fn split(
    py: Python<'_>,
    parts: u64,
    lengths: Option<&Bound<'_, PyAny>>,
) -> PyResult<Split> {
    let Some(given) = lengths else {
        // The bound of the store, checked there too; here it bounds memory.
        if parts == 0 || parts > 4096 {
            return Err(errors::input(py, "parts", parts, "1 to 4096 parts"));
        }
        return Ok(Split::Equal(parts));
    };
    let mut lengths = Vec::new();
    for (index, item) in given.try_iter()?.enumerate() {
        lengths.push(number(&format!("part_lengths[{index}]"), &item?)?);
    }
    if lengths.len() as u64 != parts {
        let value = format!("{} numbers for {parts} parts", lengths.len());
        return Err(errors::input(
            py,
            "part_lengths",
            value,
            "one number per part",
        ));
    }
    Ok(Split::Lengths(lengths))
}

impl Split {
    /// The part lengths of a block.
    pub(crate) fn of(&self, py: Python<'_>, index: usize, length: u64) -> PyResult<Vec<u64>> {
        match self {
            Split::Equal(parts) if length.is_multiple_of(*parts) => {
                Ok(vec![length / parts; *parts as usize])
            }
            Split::Equal(parts) => Err(errors::input(
                py,
                format!("lengths[{index}]"),
                length,
                format!("a multiple of parts = {parts}, or part_lengths"),
            )),
            Split::Lengths(lengths) => {
                let sum = lengths
                    .iter()
                    .try_fold(0u64, |sum, len| sum.checked_add(*len));
                if sum == Some(length) {
                    return Ok(lengths.clone());
                }
                Err(errors::input(
                    py,
                    format!("lengths[{index}]"),
                    length,
                    "the sum of part_lengths",
                ))
            }
        }
    }
}

/// The checksums of a commit, as many a block as it has parts.
pub(crate) fn checksums(
    reservations: &[Bound<'_, Reservation>],
    checksums: &Bound<'_, PyAny>,
) -> PyResult<Vec<Vec<Checksum>>> {
    let py = checksums.py();
    let listed = |field: String, given: &Bound<'_, PyAny>, allowed: &str| {
        errors::input(py, field, errors::shown(given), allowed)
    };
    let each = checksums.try_iter();
    let each =
        each.map_err(|_| listed("checksums".into(), checksums, "one list per reservation"))?;
    let mut all = Vec::with_capacity(reservations.len());
    for (index, item) in each.enumerate() {
        let mut parts = Vec::new();
        let item = item?;
        let sums = item.try_iter().map_err(|_| {
            let field = format!("checksums[{index}]");
            listed(field, &item, "a list with one checksum per part")
        })?;
        for (part, sum) in sums.enumerate() {
            let sum = sum?;
            let bytes = sum.extract::<[u8; 16]>().map_err(|_| {
                let field = format!("checksums[{index}][{part}]");
                let allowed = "a checksum (16 bytes), as in job.checksums";
                errors::input(py, field, errors::shown(&sum), allowed)
            })?;
            parts.push(Checksum(bytes));
        }
        let wanted = reservations.get(index).map(|one| one.get().part_count());
        if wanted.is_some_and(|wanted| wanted != parts.len()) {
            return Err(errors::input(
                py,
                format!("checksums[{index}]"),
                format!("{} checksums", parts.len()),
                format!(
                    "one checksum per part, {} in total",
                    wanted.unwrap_or_default()
                ),
            ));
        }
        all.push(parts);
    }
    if all.len() != reservations.len() {
        let value = format!(
            "{} lists for {} reservations",
            all.len(),
            reservations.len()
        );
        return Err(errors::input(
            py,
            "checksums",
            value,
            "one list per reservation",
        ));
    }
    Ok(all)
}
