//! The tables of `docs/outbound.md`.

use std::{fmt::Write, fs, path::Path};

use crate::{
    clairvoyant::Clairvoyant,
    model::{Limits, Model},
    simulation::{Campaign, Outcome, RING_TIME, run},
};

const PAGE: &str = "docs/outbound.md";
const BEGIN: &str = "<!-- tables: UPDATE=1 cargo test -p smart-router --test campaign figures -->";
const END: &str = "<!-- end of the tables -->";

/// Millionths.
pub(crate) const MISS_TARGET: u32 = 10_000;
/// Pods, and the throughput to reach as a share of the clairvoyant's.
const AIMS: [(u64, f64); 3] = [(20, 0.85), (100, 0.93), (500, 0.96)];
/// Answer rates of the first and the second half.
const ANSWER_RATES: [(f64, f64); 5] = [(0.3, 0.3), (0.5, 0.5), (0.7, 0.7), (0.3, 0.7), (0.7, 0.3)];
/// Seeds of the table. The constants of the policy were chosen with other ones.
const SEEDS: [u64; 5] = [101, 102, 103, 104, 105];
const HOURS: u64 = 4;

/// Inbound traffic beside the campaign.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Inbound {
    /// A load of 10 % of the pods, and a reserve of 10 %.
    Reserved,
    None,
}

pub(crate) fn campaign(pods: u64, answer_rates: (f64, f64), inbound: Inbound) -> Campaign {
    let (load, inbound_reserve) = match inbound {
        Inbound::Reserved => (0.1, 10),
        Inbound::None => (0.0, 0),
    };
    Campaign {
        pods,
        answer_rates,
        unanswered_ring_time: RING_TIME,
        inbound: load,
        inbound_reserve,
        hours: HOURS,
        lost_callbacks: 0,
        seed: 0,
    }
}

/// The outcomes of the router and of the clairvoyant, over all seeds.
struct Comparison {
    router: Outcome,
    clairvoyant: Outcome,
}

impl Comparison {
    fn throughput(&self) -> f64 {
        self.router.served as f64 / self.clairvoyant.served as f64
    }
}

fn compare(campaign: Campaign, miss_target: u32) -> Comparison {
    compare_after(None, campaign, miss_target)
}

/// Compares campaigns that begin with a learned answer rate.
fn compare_after(learned: Option<f64>, campaign: Campaign, miss_target: u32) -> Comparison {
    let mut comparison = Comparison { router: Outcome::default(), clairvoyant: Outcome::default() };
    for seed in SEEDS {
        let campaign = Campaign { seed, ..campaign };
        let mut model = Model::new(campaign, Limits { miss_target, ..Limits::default() });
        if let Some(rate) = learned {
            model.learn(rate);
        }
        comparison.router.add(run(campaign, &mut model));
        model.expect_no_leak();
        comparison.clairvoyant.add(run(campaign, &mut Clairvoyant::new(campaign)));
    }
    comparison
}

fn percent(share: f64) -> String {
    format!("{:.2} %", 100.0 * share)
}

/// Simulates the campaigns on a number of pods, checks the aims and returns the rows of the table.
fn rows(pods: u64, aim: f64) -> String {
    let mut text = String::new();
    for rates in ANSWER_RATES {
        let beside = compare(campaign(pods, rates, Inbound::Reserved), MISS_TARGET);
        let alone = compare(campaign(pods, rates, Inbound::None), MISS_TARGET);
        let whole = compare(campaign(pods, rates, Inbound::Reserved), 0);
        let (first, second) = rates;
        let shift = if first == second { String::new() } else { format!(", then {second}") };
        let row = format!(
            "| {pods} | {first}{shift} | {:.3} | {} | {} ({}) | {:.3} | {} | {:.3} |",
            beside.throughput(),
            percent(beside.router.miss_share()),
            percent(beside.router.inbound_refused_share()),
            percent(beside.clairvoyant.inbound_refused_share()),
            alone.throughput(),
            percent(alone.router.miss_share()),
            whole.throughput(),
        );
        println!("{row}");
        for comparison in [beside, alone] {
            assert!(comparison.throughput() >= aim, "throughput: {row}");
            let misses = comparison.router.miss_share();
            assert!(misses <= f64::from(MISS_TARGET) / 1_000_000.0, "misses: {row}");
        }
        let _ = writeln!(text, "{row}");
    }
    text
}

/// Simulates all campaigns.
fn table() -> String {
    let rows = AIMS.map(|(pods, aim)| rows(pods, aim));
    format!(
        "{HOURS} hours, seeds {SEEDS:?}, miss target 1 %.\n\n\
         | pods | answer rate | throughput | answered without a pod | inbound refused (clairvoyant) \
         | throughput, no inbound | answered without a pod, no inbound | throughput at target 0 |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- |\n{}",
        rows.concat()
    )
}

/// Conditions beyond the specification of the campaigns, and the learned answer rate that they
/// begin with.
fn conditions(pods: u64) -> [(&'static str, Option<f64>, Campaign); 5] {
    let usual = campaign(pods, (0.3, 0.3), Inbound::Reserved);
    [
        (
            "dials without an answer ring for 30 s",
            None,
            Campaign { unanswered_ring_time: (30_000, 30_000), ..usual },
        ),
        (
            "the same, without inbound calls and reserve",
            None,
            Campaign {
                unanswered_ring_time: (30_000, 30_000),
                ..campaign(pods, (0.3, 0.3), Inbound::None)
            },
        ),
        ("10 % of the callbacks are lost", None, Campaign { lost_callbacks: 10, ..usual }),
        ("twice the inbound load, same reserve", None, Campaign { inbound: 0.2, ..usual }),
        (
            "0.7 on idle pods, after a campaign at 0.3",
            Some(0.3),
            campaign(pods, (0.7, 0.7), Inbound::Reserved),
        ),
    ]
}

fn table_of_conditions() -> String {
    let mut text = String::from(
        "Each cell: throughput, answered without a pod, inbound refused.\n\n\
         | condition | 20 pods | 100 pods | 500 pods |\n| --- | --- | --- | --- |\n",
    );
    let columns = AIMS.map(|(pods, _)| conditions(pods));
    for (index, (name, ..)) in columns[0].iter().enumerate() {
        let mut row = format!("| {name} |");
        for (_, learned, campaign) in columns.iter().map(|column| column[index]) {
            let result = compare_after(learned, campaign, MISS_TARGET);
            let misses = result.router.miss_share();
            let _ = write!(
                row,
                " {:.3}, {}, {} |",
                result.throughput(),
                percent(misses),
                percent(result.router.inbound_refused_share()),
            );
            assert!(misses <= f64::from(MISS_TARGET) / 1_000_000.0, "misses: {row}");
        }
        println!("{row}");
        let _ = writeln!(text, "{row}");
    }
    text
}

/// Checks the rows of 20 pods. `CAMPAIGN=full` checks all figures, `UPDATE=1` writes them into the
/// page; both take minutes.
#[test]
fn the_page_has_the_figures_of_the_simulator() {
    let path = Path::new(testkit::ROOT).join(PAGE);
    let page = fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(BEGIN).expect("the page has the tables");
    let (tables_of_page, after) = rest.split_once(END).expect("the tables have an end");
    let is_set = |name| std::env::var_os(name).is_some();
    if !is_set("UPDATE") && !is_set("CAMPAIGN") {
        let (pods, aim) = AIMS[0];
        let rows = rows(pods, aim);
        assert!(tables_of_page.contains(&rows), "UPDATE=1 writes the tables; expected {rows}");
        return;
    }
    let tables = format!("\n{}\n{}", table(), table_of_conditions());
    if is_set("UPDATE") {
        fs::write(&path, format!("{before}{BEGIN}{tables}{END}{after}")).unwrap();
    } else {
        assert_eq!(tables_of_page, tables, "UPDATE=1 writes the tables");
    }
}
