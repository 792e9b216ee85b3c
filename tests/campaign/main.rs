//! The campaign simulator: throughput and misses of outbound calls with reservations, against a
//! dialler that knows which dials will be answered.

mod clairvoyant;
mod figures;
mod model;
mod simulation;

use self::{
    figures::{Inbound, MISS_TARGET, campaign},
    model::{Limits, Model},
    simulation::{Campaign, run},
};

#[test]
fn calls_per_second_and_lines_are_never_exceeded() {
    let campaign = Campaign { hours: 1, seed: 5, ..campaign(100, (0.3, 0.7), Inbound::Reserved) };
    for (max_cps, max_lines) in [(1, 20), (3, 40), (7, 1_000)] {
        println!("seed {}, {max_cps} calls per second, {max_lines} lines", campaign.seed);
        let limits =
            Limits { miss_target: MISS_TARGET, max_lines: Some(max_lines), max_cps: Some(max_cps) };
        // The model checks each grant.
        let mut model = Model::new(campaign, limits);
        let outcome = run(campaign, &mut model);
        model.expect_no_leak();
        assert!(outcome.served > 100, "{outcome:?}");
    }
}

#[test]
fn dials_whose_end_is_never_reported_leak_nothing() {
    let campaign = Campaign {
        hours: 1,
        seed: 6,
        lost_callbacks: 30,
        ..campaign(20, (0.5, 0.5), Inbound::Reserved)
    };
    println!("seed {}", campaign.seed);
    let limits = Limits { miss_target: MISS_TARGET, max_lines: Some(100), max_cps: None };
    let mut model = Model::new(campaign, limits);
    let outcome = run(campaign, &mut model);
    model.expect_no_leak();
    assert!(outcome.served > 100 && outcome.miss_share() <= 0.01, "{outcome:?}");
}
