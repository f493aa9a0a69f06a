//! Results on stdout, as a table or as one JSON object a line; progress on stderr.

use std::io::{self, BufWriter, Stdout, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use kvdepot_store::config::size;
use serde::Serialize;

use crate::error::Error;

/// Where a command's results go.
pub(crate) struct Output {
    json: bool,
    out: BufWriter<Stdout>,
}

impl Output {
    pub(crate) fn new(json: bool) -> Output {
        Output {
            json,
            out: BufWriter::with_capacity(1 << 16, io::stdout()),
        }
    }

    /// Whether results are JSON objects.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// Writes one object as one line.
    pub(crate) fn object(&mut self, object: &impl Serialize) -> Result<(), Error> {
        let line = serde_json::to_string(object)?;
        self.line(&line)
    }

    /// Writes one line.
    pub(crate) fn line(&mut self, line: &str) -> Result<(), Error> {
        self.out.write_all(line.as_bytes())?;
        Ok(self.out.write_all(b"\n")?)
    }

    /// Writes a table.
    pub(crate) fn table(&mut self, table: &Table) -> Result<(), Error> {
        let widths = table.widths();
        table
            .rows
            .iter()
            .try_for_each(|row| self.line(&table.render(row, &widths)))
    }

    /// Lets a reader see what was written so far.
    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        Ok(self.out.flush()?)
    }
}

/// Says something to people, beside the results.
pub(crate) fn note(text: &str) {
    // Where stderr is closed nobody listens.
    let _written = writeln!(io::stderr().lock(), "{text}");
}

/// Columns that line up: numbers to the right, words to the left.
pub(crate) struct Table {
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings; those that begin with `>` head columns of numbers.
    pub(crate) fn new(headings: &[&str]) -> Table {
        let right = headings.iter().map(|h| h.starts_with('>')).collect();
        let head = headings
            .iter()
            .map(|h| h.trim_start_matches('>').to_uppercase());
        Table {
            right,
            rows: vec![head.collect()],
        }
    }

    /// Pairs of a name and a value, without headings.
    pub(crate) fn pairs() -> Table {
        Table {
            right: vec![false, false],
            rows: Vec::new(),
        }
    }

    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        debug_assert_eq!(N, self.right.len());
        self.rows.push(cells.into());
    }

    fn widths(&self) -> Vec<usize> {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.max().unwrap_or(0)
        };
        (0..self.right.len()).map(width).collect()
    }

    fn render(&self, row: &[String], widths: &[usize]) -> String {
        let mut line = String::new();
        for ((cell, width), right) in row.iter().zip(widths).zip(&self.right) {
            if !line.is_empty() {
                line.push_str("  ");
            }
            let pad = " ".repeat(width.saturating_sub(cell.chars().count()));
            if *right {
                line.push_str(&pad);
                line.push_str(cell);
            } else {
                line.push_str(cell);
                line.push_str(&pad);
            }
        }
        line.truncate(line.trim_end().len());
        line
    }
}

/// A bar over bytes on stderr, where that is a terminal.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    pub(crate) fn bytes(what: &str) -> Progress {
        let bar = ProgressBar::new(0);
        let template = "{prefix} {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}";
        Progress(style(bar, template, what))
    }

    /// A bar over steps.
    pub(crate) fn steps(what: &str, steps: u64) -> Progress {
        let bar = ProgressBar::new(steps);
        Progress(style(bar, "{prefix} {wide_bar} {pos}/{len} {msg}", what))
    }

    pub(crate) fn set(&self, at: u64, of: u64) {
        self.0.set_length(of);
        self.0.set_position(at);
    }

    pub(crate) fn step(&self, message: &str) {
        self.0.inc(1);
        self.0.set_message(message.to_owned());
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

fn style(bar: ProgressBar, template: &str, what: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template);
    let bar = match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    };
    bar.with_prefix(what.to_owned())
}

/// Bytes for people, with the exact number where the unit rounds it.
pub(crate) fn bytes(bytes: u64) -> String {
    size::show(bytes)
}

/// A count with separators: `1,048,576`.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count of things, with the noun in its number: `1 block`, `2,000 blocks`.
pub(crate) fn some(number: u64, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", count(number))
}

/// A share in per cent.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".into();
    }
    format!("{:.1} %", part as f64 * 100.0 / whole as f64)
}

/// Unix seconds as UTC, such as `2026-03-21 17:05:09Z`.
pub(crate) fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days to a date in the Gregorian calendar (Howard Hinnant's algorithm): years begin in March,
    // so that the leap day is the last one.
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}Z")
}

/// A duration for people.
pub(crate) fn span(duration: Duration) -> String {
    format!("{:.2} s", duration.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right_around_leap_days() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00Z"),
            (951_782_399, "2000-02-28 23:59:59Z"),
            (951_782_400, "2000-02-29 00:00:00Z"),
            (1_709_251_199, "2024-02-29 23:59:59Z"),
            (1_709_251_200, "2024-03-01 00:00:00Z"),
            (4_107_542_400, "2100-03-01 00:00:00Z"),
        ] {
            assert_eq!(utc(seconds), text);
        }
    }

    #[test]
    fn counts_have_separators() {
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(1_048_576), "1,048,576");
        assert_eq!(
            [0, 1, 2000].map(|n| some(n, "block")),
            ["0 blocks", "1 block", "2,000 blocks"]
        );
    }

    #[test]
    fn numbers_line_up_to_the_right() {
        let mut table = Table::new(&["name", ">bytes"]);
        table.row(["a".into(), "7".into()]);
        table.row(["long".into(), "12345".into()]);
        let widths = table.widths();
        let lines: Vec<String> = table
            .rows
            .iter()
            .map(|row| table.render(row, &widths))
            .collect();
        assert_eq!(lines, ["NAME  BYTES", "a         7", "long  12345"]);
    }
}
