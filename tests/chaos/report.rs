//! Summary of all runs, printed and written to the documentation.

use std::{collections::BTreeMap, fmt::Write, fs};

use super::{cell, run::RunResult};
use testkit::measurement::describe_machine;

const DOCUMENT: &str = "docs/reliability.md";
const BEGIN: &str = "<!-- results -->\n";
const END: &str = "<!-- end of results -->";
/// The name of runs with random faults.
pub(crate) const MIX: &str = "mix";

#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Row {
    runs: usize,
    failed: usize,
    violations: usize,
    /// The invariants that detected the broken build; `Some(None)` if it was not detected.
    broken: Option<Option<String>>,
}

#[derive(Debug, Default)]
pub(crate) struct Summary {
    rows: BTreeMap<String, Row>,
}

impl Summary {
    pub(crate) fn add_run(&mut self, cell: &str, result: &RunResult) {
        let row = self.rows.entry(cell.into()).or_default();
        row.runs += usize::from(result.error.is_none());
        row.failed += usize::from(result.error.is_some());
        row.violations += usize::from(!result.violations.is_empty());
    }

    pub(crate) fn add_broken_build(&mut self, cell: &str, caught: Option<String>) {
        self.rows.entry(cell.into()).or_default().broken = Some(caught);
    }

    /// No violations, no failed runs, no undetected broken builds.
    pub(crate) fn is_clean(&self) -> bool {
        let is_clean =
            |row: &Row| row.violations == 0 && row.failed == 0 && row.broken != Some(None);
        self.rows.values().all(is_clean)
    }

    pub(crate) fn table(&self) -> String {
        let mut text = "| cell | fault | runs | violations | broken build | caught by |\n| --- | --- | --- | --- | --- | --- |\n".to_owned();
        let known = cell::all().map(|cell| (cell.name, cell.description, cell.broken_description));
        for (name, description, broken) in
            known.chain([(MIX, "several of these in sequence, with drains and pod churn", "–")])
        {
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
                "| {name} | {description} | {}{failed} | {} | {broken} | {caught} |",
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

    /// Parses the output of [`Self::table`].
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

    /// Adds the results to those of this commit; results of an earlier commit shrink to a line.
    pub(crate) fn write(&self) {
        let document = fs::read_to_string(DOCUMENT).expect("the document exists");
        let (before, rest) = document.split_once(BEGIN).expect("the document has a results block");
        let (block, after) = rest.split_once(END).expect("the results block ends");
        let block = self.merged(block, &describe_machine());
        fs::write(DOCUMENT, format!("{before}{BEGIN}{block}{END}{after}"))
            .expect("the document can be written");
    }

    fn merged(&self, block: &str, machine: &str) -> String {
        let earlier: Vec<&str> = block.lines().filter(|line| line.starts_with("- ")).collect();
        let mut earlier: Vec<String> = earlier.into_iter().map(str::to_owned).collect();
        let header = block.lines().find(|line| line.starts_with("On "));
        let mut all = Self::default();
        let written = Self::read(block);
        match header {
            Some(header) if header == format!("On {machine}:") => all.add(&written),
            Some(header) => {
                let machine = header.trim_start_matches("On ").trim_end_matches(':');
                earlier.insert(0, format!("- {machine}: {}", written.last_line()));
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
