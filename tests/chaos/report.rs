//! What all runs together say.

use std::{collections::BTreeMap, fmt::Write};

use super::{cells::CELLS, run::Verdict};

#[derive(Default)]
struct Row {
    runs: usize,
    failed: usize,
    violations: usize,
    /// Whether the broken build was caught, and by which invariant.
    broken: Option<Option<&'static str>>,
}

#[derive(Default)]
pub struct Tally {
    rows: BTreeMap<&'static str, Row>,
}

impl Tally {
    pub fn ran(&mut self, cell: &'static str, verdict: &Verdict) {
        let row = self.rows.entry(cell).or_default();
        row.runs += usize::from(verdict.failed.is_none());
        row.failed += usize::from(verdict.failed.is_some());
        row.violations += usize::from(!verdict.violations.is_empty());
    }

    pub fn broke(&mut self, cell: &'static str, caught: Option<&'static str>) {
        self.rows.entry(cell).or_default().broken = Some(caught);
    }

    /// No violation, no run that could not be run, no broken build that got away.
    pub fn is_clean(&self) -> bool {
        self.rows
            .values()
            .all(|row| row.violations == 0 && row.failed == 0 && row.broken != Some(None))
    }

    pub fn table(&self) -> String {
        let mut text = "\n| cell | fault | runs | violations | broken build | caught by |\n| --- | --- | --- | --- | --- | --- |\n".to_owned();
        let known = CELLS.iter().map(|cell| (cell.name, cell.says, cell.broken_says));
        for (name, says, broken) in known.chain([("mix", "a random mix", "")]) {
            let Some(row) = self.rows.get(name) else { continue };
            let caught = match row.broken {
                None => "–",
                Some(None) => "NOT CAUGHT",
                Some(Some(invariant)) => invariant,
            };
            let failed =
                if row.failed > 0 { format!(" (+{} not run)", row.failed) } else { String::new() };
            let _ = writeln!(
                text,
                "| {name} | {says} | {}{failed} | {} | {broken} | {caught} |",
                row.runs, row.violations
            );
        }
        text
    }

    pub fn last_line(&self) -> String {
        let runs: usize = self.rows.values().map(|row| row.runs).sum();
        let violations: usize = self.rows.values().map(|row| row.violations).sum();
        format!("chaos: {} cells, {runs} runs, {violations} violations", self.rows.len())
    }

    pub fn write(&self) {}
}
