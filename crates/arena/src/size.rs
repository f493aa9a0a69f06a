//! Sizes and durations with units, for people.

use std::time::Duration;

const UNITS: [(&str, u64); 18] = [
    ("b", 1),
    ("k", 1 << 10),
    ("kb", 1000),
    ("ki", 1 << 10),
    ("kib", 1 << 10),
    ("m", 1 << 20),
    ("mb", 1_000_000),
    ("mi", 1 << 20),
    ("mib", 1 << 20),
    ("g", 1 << 30),
    ("gb", 1_000_000_000),
    ("gi", 1 << 30),
    ("gib", 1 << 30),
    ("t", 1 << 40),
    ("tb", 1_000_000_000_000),
    ("ti", 1 << 40),
    ("tib", 1 << 40),
    ("", 1),
];

/// Description of the syntax that [`size`] accepts, for messages.
pub const SIZE_HELP: &str = "a size above zero, such as 512MiB, 64GiB (also 64Gi, 64G), 1.5TB \
                             (decimal) or a whole number of bytes";
/// Description of the syntax that [`duration`] accepts, for messages.
pub const DURATION_HELP: &str = "a duration such as 500ms, 10s, 2min or a number of seconds";

fn split(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_'));
    let (number, unit) = text.split_at(end.unwrap_or(text.len()));
    (number, unit.trim())
}

/// Parses a size in bytes, such as `64GiB`, `1.5 TB` or `4096`.
///
/// Units such as `GiB`, `Gi` and `G` are binary; units such as `GB` are decimal. A number of bytes
/// must be whole. Returns `None` for anything else.
#[must_use]
pub fn size(text: &str) -> Option<u64> {
    let (number, unit) = split(text);
    let unit = unit.to_ascii_lowercase();
    let factor = UNITS.iter().find(|(name, _)| *name == unit)?.1;
    let number = number.replace('_', "");
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor);
    }
    // A unit was forgotten: half a byte is nothing that somebody means.
    if factor == 1 {
        return None;
    }
    let bytes = number.parse::<f64>().ok()? * factor as f64;
    (bytes.is_finite() && bytes >= 0.0 && bytes < u64::MAX as f64).then_some(bytes as u64)
}

/// Parses a duration such as `10s`, `500ms`, `2min` or `1.5` (seconds). Returns `None` for anything
/// else.
#[must_use]
pub fn duration(text: &str) -> Option<Duration> {
    let (number, unit) = split(text);
    let factor = match unit {
        "" | "s" => 1.0,
        "ms" => 1e-3,
        "us" => 1e-6,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return None,
    };
    let seconds = number.parse::<f64>().ok()? * factor;
    Duration::try_from_secs_f64(seconds).ok()
}

/// Formats a number of bytes for people, for example `1.5 GiB`.
#[must_use]
pub fn show(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut unit = 0;
    let names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    while value >= 1024.0 && unit + 1 < names.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = usize::from(value.fract() != 0.0);
    format!("{value:.digits$} {}", names[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_people_write_them() {
        for (text, bytes) in [
            ("4096", 4096),
            ("64GiB", 64 << 30),
            ("64 gib", 64 << 30),
            ("64G", 64 << 30),
            ("64Gi", 64 << 30),
            ("1Ki", 1 << 10),
            ("64M", 64 << 20),
            ("64MB", 64_000_000),
            ("1.5GiB", 3 << 29),
            ("2TB", 2_000_000_000_000),
            ("1_000", 1000),
        ] {
            assert_eq!(size(text), Some(bytes), "{text}");
        }
        for text in [
            "",
            "GiB",
            "-1",
            "1XB",
            "1e400",
            "1.2.3",
            "99999999999TiB",
            "1.5",
            "1.0",
            "0.5B",
        ] {
            assert_eq!(size(text), None, "{text}");
        }
    }

    #[test]
    fn durations_read_as_people_write_them() {
        assert_eq!(duration("500ms"), Some(Duration::from_millis(500)));
        assert_eq!(duration("10"), Some(Duration::from_secs(10)));
        assert_eq!(duration("2 min"), Some(Duration::from_secs(120)));
        assert_eq!(duration("ten"), None);
        assert_eq!(duration("5 parsecs"), None);
    }

    #[test]
    fn sizes_show_with_their_unit() {
        assert_eq!(show(512), "512 B");
        assert_eq!(show(3 << 29), "1.5 GiB");
    }
}
