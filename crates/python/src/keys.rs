//! Keys as Python gives them: one contiguous buffer, or a sequence of 32-byte values. And those of
//! a prompt's tokens.

use std::ops::Deref;

use kvdepot_store::Key;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};

use crate::view::View;
use crate::{arguments, errors};

const ALLOWED: &str = "32-byte values, or one contiguous buffer of them";

/// Returns the keys of a prompt: one per full block of tokens.
///
/// A key is the SHA-256 of the previous key and the block's tokens, as little-endian 32-bit
/// integers. The first block uses the SHA-256 of "kvdepot keys 1" and the salt as its previous key.
/// Equal keys therefore mean equal tokens from the first one on.
///
/// Args:
///     tokens: Token ids, each from 0 to 2^32 - 1: a sequence, an array or a tensor of shape (n,).
///     block_tokens: Tokens per block, at least 1.
///     salt: Names everything else that the KV bytes depend on, such as an image, an adapter or a
///         tenant. A text is encoded in UTF-8. Default: empty.
///
/// Returns:
///     `n // block_tokens` keys of 32 bytes, in prompt order.
///
/// Raises:
///     InputError: A token is not an integer from 0 to 2^32 - 1, or `block_tokens` is less than 1.
#[pyfunction(name = "keys")]
#[pyo3(signature = (tokens, block_tokens, salt = None))]
pub(crate) fn of_tokens<'py>(
    tokens: &Bound<'py, PyAny>,
    block_tokens: &Bound<'py, PyAny>,
    salt: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyList>> {
    let py = tokens.py();
    let block_tokens = arguments::number_from(1, "block_tokens", block_tokens)?;
    // Larger than any prompt is as good as the largest.
    let block_tokens = usize::try_from(block_tokens).unwrap_or(usize::MAX);
    let salt = match salt {
        None => Vec::new(),
        Some(salt) => match (salt.cast::<PyString>(), salt.cast::<PyBytes>()) {
            (Ok(text), _) => arguments::text("salt", text)?.into_bytes(),
            (_, Ok(bytes)) => bytes.as_bytes().to_vec(),
            _ => {
                let shown = errors::shown(salt);
                return Err(errors::input(py, "salt", shown, "a string or bytes"));
            }
        },
    };
    let tokens = read_tokens(tokens)?;
    let keys = py.detach(|| Key::chain(&tokens, block_tokens, &salt));
    let keys = keys.map_err(|error| errors::raise(py, error))?;
    PyList::new(py, keys.iter().map(|key| PyBytes::new(py, &key.0)))
}

/// Tokens that a verb is given, as `keys` takes them.
pub(crate) struct Tokens(pub(crate) Vec<u32>);

impl Deref for Tokens {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.0
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Tokens {
    type Error = PyErr;

    fn extract(given: Borrowed<'a, 'py, PyAny>) -> PyResult<Tokens> {
        Ok(Tokens(read_tokens(&given)?))
    }
}

fn read_tokens(tokens: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let py = tokens.py();
    // Arrays and tensors are much faster to read as lists.
    let list = match tokens.getattr_opt(intern!(py, "tolist"))? {
        Some(to_list) => to_list.call0()?,
        None => tokens.clone(),
    };
    let Ok(items) = list.try_iter() else {
        let allowed = "a sequence or an array of token IDs";
        return Err(errors::input(py, "tokens", errors::shown(tokens), allowed));
    };
    let mut read = Vec::new();
    for (index, token) in items.enumerate() {
        let token = token?;
        read.push(token.extract().map_err(|_| {
            let allowed = "a token ID, 0 to 2^32 - 1";
            errors::input(
                py,
                format!("tokens[{index}]"),
                errors::shown(&token),
                allowed,
            )
        })?);
    }
    Ok(read)
}

/// Reads the key of the block that a call continues.
pub(crate) fn after(key: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Key>> {
    key.map(|key| one(|| "after".into(), key)).transpose()
}

/// Reads the keys of a call.
pub(crate) fn parse(keys: &Bound<'_, PyAny>) -> PyResult<Vec<Key>> {
    let py = keys.py();
    if let Ok(bytes) = keys.cast::<PyBytes>() {
        return many(py, bytes.as_bytes());
    }
    if let Ok(list) = keys.cast::<PyList>() {
        return each(list.iter());
    }
    if let Ok(tuple) = keys.cast::<PyTuple>() {
        return each(tuple.iter());
    }
    if let Ok(view) = View::in_rows(keys) {
        return match view {
            Some(view) => many(py, &view.to_vec()),
            None => Err(errors::input(
                py,
                "keys",
                "a buffer with gaps",
                "contiguous memory with concatenated keys",
            )),
        };
    }
    let Ok(items) = keys.try_iter() else {
        return Err(errors::input(py, "keys", errors::shown(keys), ALLOWED));
    };
    let items: Vec<_> = items.collect::<PyResult<_>>()?;
    each(items.into_iter())
}

fn many(py: Python<'_>, bytes: &[u8]) -> PyResult<Vec<Key>> {
    Key::many(bytes).map_err(|error| errors::raise(py, error))
}

fn each<'py>(items: impl ExactSizeIterator<Item = Bound<'py, PyAny>>) -> PyResult<Vec<Key>> {
    let mut keys = Vec::with_capacity(items.len());
    for (index, item) in items.enumerate() {
        keys.push(one(|| format!("keys[{index}]"), &item)?);
    }
    Ok(keys)
}

fn one(field: impl Fn() -> String, item: &Bound<'_, PyAny>) -> PyResult<Key> {
    let wrong = |value: String| errors::input(item.py(), field(), value, "a key of 32 bytes");
    let key = |bytes: &[u8]| match bytes.try_into() {
        Ok(key) => Ok(Key(key)),
        Err(_) => Err(wrong(format!("a value of {} bytes", bytes.len()))),
    };
    if let Ok(bytes) = item.cast::<PyBytes>() {
        return key(bytes.as_bytes());
    }
    match View::in_rows(item) {
        Ok(Some(view)) => key(&view.to_vec()),
        _ => Err(wrong(errors::shown(item))),
    }
}
