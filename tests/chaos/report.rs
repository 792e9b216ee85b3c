//! What all runs together say, and where it is written down.

use std::{collections::BTreeMap, fmt::Write, fs};

use super::{cells::CELLS, run::Verdict};
use testkit::measurement::machine;

const DOCUMENT: &str = "docs/reliability.md";
const BEGIN: &str = "<!-- results -->\n";
const END: &str = "<!-- end of results -->";
/// The name of runs with several faults.
pub(crate) const MIX: &str = "mix";

#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Row {
    runs: usize,
    failed: usize,
    violations: usize,
    /// Whether the broken build was caught, and by which invariants.
    broken: Option<Option<String>>,
}

#[derive(Debug, Default)]
pub(crate) struct Tally {
    rows: BTreeMap<String, Row>,
}

impl Tally {
    pub(crate) fn ran(&mut self, cell: &str, verdict: &Verdict) {
        let row = self.rows.entry(cell.into()).or_default();
        row.runs += usize::from(verdict.failed.is_none());
        row.failed += usize::from(verdict.failed.is_some());
        row.violations += usize::from(!verdict.violations.is_empty());
    }

    pub(crate) fn broke(&mut self, cell: &str, caught: Option<String>) {
        self.rows.entry(cell.into()).or_default().broken = Some(caught);
    }

    /// No violation, no run that could not be run, no broken build that got away.
    pub(crate) fn is_clean(&self) -> bool {
        let is_clean =
            |row: &Row| row.violations == 0 && row.failed == 0 && row.broken != Some(None);
        self.rows.values().all(is_clean)
    }

    pub(crate) fn table(&self) -> String {
        let mut text = "| cell | fault | runs | violations | broken build | caught by |\n| --- | --- | --- | --- | --- | --- |\n".to_owned();
        let known = CELLS.iter().map(|cell| (cell.name, cell.says, cell.broken_says));
        for (name, says, broken) in known.chain([(
            MIX,
            "several of these, one after the other, with drains and pods that come and go",
            "–",
        )]) {
            let Some(row) = self.rows.get(name) else { continue };
            let caught = match &row.broken {
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

    pub(crate) fn last_line(&self) -> String {
        let runs: usize = self.rows.values().map(|row| row.runs).sum();
        let violations: usize = self.rows.values().map(|row| row.violations).sum();
        format!("chaos: {} cells, {runs} runs, {violations} violations", self.rows.len())
    }

    /// What a table says; the opposite of [`Self::table`].
    fn read(table: &str) -> Self {
        let mut rows = BTreeMap::new();
        for line in table.lines().filter(|line| line.starts_with("| ")).skip(2) {
            let fields: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let [cell, _, runs, violations, _, caught] = fields[..] else { continue };
            let number =
                |text: &str| text.split(' ').next().and_then(|it| it.parse().ok()).unwrap_or(0);
            let failed = runs.split_once("(+").map_or(0, |(_, rest)| number(rest));
            let broken = match caught {
                "–" => None,
                "NOT CAUGHT" => Some(None),
                invariant => Some(Some(invariant.to_owned())),
            };
            let row = Row { runs: number(runs), failed, violations: number(violations), broken };
            rows.insert(cell.to_owned(), row);
        }
        Self { rows }
    }

    fn add(&mut self, other: &Self) {
        for (cell, more) in &other.rows {
            let row = self.rows.entry(cell.clone()).or_default();
            row.runs += more.runs;
            row.failed += more.failed;
            row.violations += more.violations;
            row.broken = more.broken.clone().or(row.broken.take());
        }
    }

    /// Adds the results to those of this commit; those of the commit before become a line.
    pub(crate) fn write(&self) {
        let document = fs::read_to_string(DOCUMENT).expect("the document is there");
        let (before, rest) = document.split_once(BEGIN).expect("it has a place for results");
        let (block, after) = rest.split_once(END).expect("which ends");
        let block = self.joined(block, &machine());
        fs::write(DOCUMENT, format!("{before}{BEGIN}{block}{END}{after}"))
            .expect("it can be written");
    }

    fn joined(&self, block: &str, machine: &str) -> String {
        let earlier: Vec<&str> = block.lines().filter(|line| line.starts_with("- ")).collect();
        let mut earlier: Vec<String> = earlier.into_iter().map(str::to_owned).collect();
        let place = block.lines().find(|line| line.starts_with("On "));
        let mut all = Self::default();
        let written = Self::read(block);
        match place {
            Some(place) if place == format!("On {machine}:") => all.add(&written),
            Some(place) => {
                let place = place.trim_start_matches("On ").trim_end_matches(':');
                earlier.insert(0, format!("- {place}: {}", written.last_line()));
            }
            None => {}
        }
        all.add(self);
        let mut text = format!("\nOn {machine}:\n\n{}\n`{}`\n\n", all.table(), all.last_line());
        if !earlier.is_empty() {
            text += &format!("Earlier:\n\n{}\n\n", earlier.join("\n"));
        }
        text
    }
}
