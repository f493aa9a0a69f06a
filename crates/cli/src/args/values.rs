//! Values of options, as they are written on the command line.

use kvdepot_store::Key;
use kvdepot_store::config::size;

/// Reads a size with its unit.
pub(super) fn bytes(text: &str) -> Result<u64, String> {
    match size::size(text) {
        Some(bytes) if bytes > 0 => Ok(bytes),
        _ => Err(format!("expected {}", size::SIZE_HELP)),
    }
}

pub(super) fn threads(text: &str) -> Result<usize, String> {
    let allowed = 1..=256;
    let count = text.parse().ok().filter(|count| allowed.contains(count));
    count.ok_or_else(|| "expected 1 to 256".into())
}

pub(super) fn count(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| *count > 0);
    count.ok_or_else(|| "expected a whole number, 1 or more".into())
}

pub(super) fn hexadecimal(text: &str) -> Result<String, String> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err("expected hexadecimal digits".into());
    }
    Ok(text.to_ascii_lowercase())
}

pub(super) fn key(text: &str) -> Result<Key, String> {
    let refused = || format!("expected {} hexadecimal digits", 2 * Key::LEN);
    if text.len() != 2 * Key::LEN || !text.is_ascii() {
        return Err(refused());
    }
    let mut key = [0; Key::LEN];
    for (index, byte) in key.iter_mut().enumerate() {
        let digits = &text[2 * index..2 * index + 2];
        *byte = u8::from_str_radix(digits, 16).map_err(|_| refused())?;
    }
    Ok(Key(key))
}

/// Sizes and rounds of a measurement.
#[derive(clap::Args)]
pub(crate) struct Extent {
    /// Size of the measured tier, in bytes or with a unit [default: 1GiB].
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) size: Option<u64>,
    /// Size of all blocks of a call, in bytes or with a unit [default: 128MiB].
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) batch: Option<u64>,
    /// Number of measured rounds, at least 1 [default: 15].
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub(crate) rounds: Option<usize>,
}
