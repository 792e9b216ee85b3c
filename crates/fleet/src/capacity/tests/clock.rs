//! Clock steps, missing observations and time zones.

use super::*;

fn steady() -> (Pool, u64) {
    let mut pool = pool();
    let desired = pool.run(6 * HOUR, 0.5).desired;
    (pool, desired)
}

fn similar(desired: u64, before: u64) {
    assert!(desired.abs_diff(before) <= before / 5, "{desired} after {before}");
}

#[test]
fn a_step_back_of_the_clock_changes_little() {
    let (mut pool, before) = steady();
    pool.now -= 3 * HOUR;
    pool.starting.clear();
    similar(pool.step(0.5).desired, before);
    similar(pool.run(HOUR, 0.5).desired, before);
}

#[test]
fn a_step_forward_of_the_clock_changes_little() {
    let (mut pool, before) = steady();
    pool.now += 2 * HOUR;
    similar(pool.step(0.5).desired, before);
    similar(pool.run(HOUR, 0.5).desired, before);
}

#[test]
fn a_step_of_minutes_forward_is_not_learned_as_silence() {
    for minutes in [2, 8, 20, 29] {
        let (mut pool, before) = steady();
        pool.now += minutes * 60;
        let decisions: Vec<u64> = (0..180).map(|_| pool.step(0.5).desired).collect();
        let (least, most) = (decisions.iter().min(), decisions.iter().max());
        let is_similar = least >= Some(&(before * 9 / 10)) && most <= Some(&(before * 11 / 10));
        assert!(is_similar, "{least:?} to {most:?} after {before}, {minutes} minutes");
    }
}

#[test]
fn an_observer_that_becomes_slower_is_soon_learned_from() {
    let (mut pool, _) = steady();
    let mut decision = pool.step(0.5);
    // Half the calls, seen every five minutes.
    for _ in 0..24 {
        pool.now += 300;
        let arrivals = 60;
        let seen = Observation { arrivals, live: 36, ready: 100, ..pool.observation() };
        decision = pool.policy.step(&seen);
    }
    assert!(decision.expected_calls < 45.0, "{decision:?}");
}

#[test]
fn a_gap_in_the_observations_is_not_learned_as_silence() {
    let (mut pool, before) = steady();
    pool.now += 45 * 60;
    pool.arrivals = 0.0;
    similar(pool.run(60, 0.5).desired, before);
}

#[test]
fn arrivals_of_an_unknown_number_are_not_learned() {
    let (mut pool, before) = steady();
    for _ in 0..12 {
        let lost = Observation { arrivals: 0, gap: true, ..pool.observation() };
        similar(pool.policy.step(&lost).desired, before);
        let burst = Observation { arrivals: 100_000, gap: true, ..pool.observation() };
        similar(pool.policy.step(&burst).desired, before);
        pool.now += STEP;
    }
    similar(pool.run(60, 0.5).desired, before);
}

#[test]
fn a_repeated_time_is_no_interval() {
    let (mut pool, before) = steady();
    for _ in 0..5 {
        let observation = pool.observation();
        similar(pool.policy.step(&observation).desired, before);
    }
}

#[test]
fn days_are_those_of_the_time_zone() {
    // Clocks go forward in Berlin on Sunday, 30 March 2025: 07:00 is 06:00 UTC, then 05:00 UTC.
    let zone = "Europe/Berlin".parse().unwrap();
    let mut pool = Pool::new(Settings { zone, ..Settings::default() });
    pool.now = 1_743_206_400; // Saturday, 29 March 2025, 00:00 UTC
    let opens = [6 * HOUR, DAY + 5 * HOUR];
    let mut missed = Vec::new();
    let start = pool.now;
    for open in opens {
        pool.run(start + open - pool.now, 0.0);
        pool.missed = 0.0;
        pool.run(2 * HOUR, 0.5);
        missed.push(pool.missed);
    }
    assert!(missed[0] > 20.0 && missed[1] < 3.0, "{missed:?}");
}

#[test]
fn an_unknown_time_zone_is_an_error() {
    assert!("Mars/Olympus".parse::<crate::capacity::Zone>().is_err());
}

#[test]
fn a_change_of_clocks_does_not_change_the_decisions_of_the_hour() {
    // In Berlin 03:00 is 02:00 again at 01:00 UTC on 26 October 2025, and 02:00 is 03:00 at
    // 01:00 UTC on 29 March 2026.
    for change in [1_761_440_400, 1_774_746_000] {
        let run = |zone: &str| {
            let zone = zone.parse().unwrap();
            let mut pool = Pool::new(Settings { zone, ..Settings::default() });
            pool.now = change - 8 * DAY;
            pool.run(8 * DAY, 2.0);
            (0..2 * HOUR / STEP).map(|_| pool.step(2.0).desired).collect::<Vec<_>>()
        };
        let (there, utc) = (run("Europe/Berlin"), run("UTC"));
        let most = there.iter().zip(&utc).map(|(there, utc)| there.abs_diff(*utc)).max();
        assert!(most <= Some(2), "{most:?} pods apart of {:?}", utc.last());
    }
}
