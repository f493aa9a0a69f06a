//! `kvdepot bench`: this machine's limits, what kvdepot reaches, and the ratio.

mod alloc;
mod churn;
mod index;
mod media;
mod memory;
mod plain;
mod reopen;
mod restore;
mod rounds;
mod scale;

use std::ffi::OsStr;

use serde::Serialize;
use serde_json::Value;

use crate::args::Bench;
use crate::error::Error;
use crate::interrupt::Interrupt;
use crate::output::{Output, Progress, Table};

/// One figure.
#[derive(Clone, Debug, Serialize)]
struct Row {
    bench: &'static str,
    /// The parameters.
    case: Value,
    metric: &'static str,
    unit: &'static str,
    value: f64,
    /// What the strongest straightforward program reaches; none where there is no such thing.
    limit: Option<f64>,
    /// Value over limit for rates, limit over value for times: 1 is the limit. The median of the
    /// ratios of each round.
    ratio: Option<f64>,
    rounds: usize,
    /// Which program the limit is.
    limit_name: Option<&'static str>,
}

/// Takes figures as they are measured.
struct Report<'a> {
    output: &'a mut Output,
    interrupt: Interrupt,
    progress: Progress,
    rows: Vec<Row>,
}

pub(crate) fn run(args: &Bench, program: &OsStr, output: &mut Output) -> Result<i32, Error> {
    if let Bench::Reopen(args) = args
        && let Some(arena) = &args.child
    {
        return reopen::child(arena, args, output);
    }
    if let Bench::Restore(args) = args
        && let Some(socket) = &args.child
    {
        return restore::child(socket, args, output);
    }
    if let Bench::Scale(args) = args
        && let Some(dir) = &args.child
    {
        return scale::child(dir, args, output);
    }
    let (name, cases) = match args {
        Bench::Memory(args) => ("bench memory", memory::cases(args)),
        Bench::Restore(args) => ("bench restore", restore::cases(args)),
        Bench::Alloc(args) => ("bench alloc", alloc::cases(args)),
        Bench::Churn(args) => ("bench churn", churn::cases(args)),
        Bench::Index(_) => ("bench index", index::CASES),
        Bench::Reopen(_) => ("bench reopen", reopen::CASES),
        Bench::Scale(args) => ("bench scale", scale::cases(args)),
    };
    let mut report = Report {
        output,
        interrupt: Interrupt::catch()?,
        progress: Progress::steps(name, cases as u64),
        rows: Vec::new(),
    };
    let result = match args {
        Bench::Memory(args) => memory::run(args, &mut report),
        Bench::Restore(args) => restore::run(args, program, &mut report),
        Bench::Alloc(args) => alloc::run(args, &mut report),
        Bench::Churn(args) => churn::run(args, &mut report),
        Bench::Index(args) => index::run(args, &mut report),
        Bench::Reopen(args) => reopen::run(args, program, &mut report),
        Bench::Scale(args) => scale::run(args, program, &mut report),
    };
    report.finish()?;
    result.map(|()| crate::OK)
}

impl Report<'_> {
    /// Takes a figure; with `--json` it is written at once.
    fn row(&mut self, row: Row) -> Result<(), Error> {
        if self.output.is_json() {
            self.output.object(&row)?;
            self.output.flush()?;
        }
        self.rows.push(row);
        Ok(())
    }

    /// Counts a case that was measured.
    fn case_done(&self, name: &str) {
        self.progress.step(name);
    }

    /// Writes the table, also of what was measured before an error.
    fn finish(self) -> Result<(), Error> {
        drop(self.progress);
        if self.output.is_json() || self.rows.is_empty() {
            return Ok(());
        }
        let headings = [
            "case", "metric", ">value", ">limit", ">ratio", "unit", "limit is",
        ];
        let mut table = Table::new(&headings);
        for row in &self.rows {
            table.row([
                words(&row.case),
                row.metric.into(),
                number(row.value),
                row.limit.map_or_else(|| "-".into(), number),
                row.ratio
                    .map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}")),
                row.unit.into(),
                row.limit_name.unwrap_or("-").into(),
            ]);
        }
        self.output.table(&table)
    }
}

/// `op=get tier=Dax block=4096`.
fn words(case: &Value) -> String {
    let fields = case.as_object().into_iter().flatten();
    let word = |(name, value): (&String, &Value)| match value {
        Value::String(text) => format!("{name}={text}"),
        other => format!("{name}={other}"),
    };
    fields.map(word).collect::<Vec<_>>().join(" ")
}

/// About four digits.
fn number(value: f64) -> String {
    let size = value.abs();
    if size >= 1e6 {
        format!("{:.1}M", value / 1e6)
    } else if size >= 100.0 {
        format!("{value:.0}")
    } else if size >= 10.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.3}")
    }
}

/// Numbers that look random, the same in every run (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Any number below this one, with chances that are equal but for a rounding.
    fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(end)) >> 64) as u64
    }

    /// Any number from one to another, both included.
    fn within(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    /// A key as a hash would give it.
    fn key(&mut self) -> kvdepot_store::Key {
        let mut key = [0; 32];
        for word in key.chunks_exact_mut(8) {
            word.copy_from_slice(&self.next().to_le_bytes());
        }
        kvdepot_store::Key(key)
    }

    /// Puts items in a random order.
    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.next() % (last as u64 + 1);
            items.swap(last, other as usize);
        }
    }
}

/// What benchmarks call the model of their blocks.
fn spec() -> kvdepot_store::NamespaceSpec {
    kvdepot_store::NamespaceSpec {
        model: "kvdepot-bench".into(),
        dtype: "bytes".into(),
        block_tokens: 1,
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_about_four_digits() {
        let shown = [0.1234, 19.81, 1234.6, 24_000_000.0, -0.5].map(number);
        assert_eq!(shown, ["0.123", "19.8", "1235", "24.0M", "-0.500"]);
    }

    #[test]
    fn shuffling_keeps_every_item() {
        let mut items: Vec<u32> = (0..100).collect();
        Random(7).shuffle(&mut items);
        assert_ne!(items, (0..100).collect::<Vec<u32>>());
        items.sort_unstable();
        assert_eq!(items, (0..100).collect::<Vec<u32>>());
    }
}
