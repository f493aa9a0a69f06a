//! Figures as they are measured: a table of them, or rows of JSON.

use serde::Serialize;
use serde_json::Value;

use crate::error::Error;
use crate::interrupt::Interrupt;
use crate::output::{Output, Progress, Table};

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) bench: &'static str,
    /// The parameters.
    pub(super) case: Value,
    pub(super) metric: &'static str,
    pub(super) unit: &'static str,
    pub(super) value: f64,
    /// What the strongest straightforward program reaches; none where there is no such thing.
    pub(super) limit: Option<f64>,
    /// Value over limit for rates, limit over value for times: 1 is the limit. The median of the
    /// ratios of each round.
    pub(super) ratio: Option<f64>,
    pub(super) rounds: usize,
    /// Which program the limit is.
    pub(super) limit_name: Option<&'static str>,
}

impl Row {
    /// The same with these figures, beside a limit.
    pub(super) fn with(
        self,
        value: f64,
        limit: f64,
        ratio: f64,
        limit_name: Option<&'static str>,
    ) -> Row {
        Row {
            value,
            limit: Some(limit),
            ratio: Some(ratio),
            limit_name,
            ..self
        }
    }
}

/// Takes figures as they are measured.
pub(super) struct Report<'a> {
    pub(super) output: &'a mut Output,
    pub(super) interrupt: Interrupt,
    pub(super) progress: Progress,
    pub(super) rows: Vec<Row>,
}

impl Report<'_> {
    /// Takes a figure; with `--json` it is written at once.
    pub(super) fn row(&mut self, row: Row) -> Result<(), Error> {
        if self.output.is_json() {
            self.output.object(&row)?;
            self.output.flush()?;
        }
        self.rows.push(row);
        Ok(())
    }

    /// Counts a case that was measured.
    pub(super) fn case_done(&self, name: &str) {
        self.progress.step(name);
    }

    /// Writes the table, also of what was measured before an error.
    pub(super) fn finish(self) -> Result<(), Error> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_about_four_digits() {
        let shown = [0.1234, 19.81, 1234.6, 24_000_000.0, -0.5].map(number);
        assert_eq!(shown, ["0.123", "19.8", "1235", "24.0M", "-0.500"]);
    }
}
