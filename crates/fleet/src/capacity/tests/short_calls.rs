//! Bursts of calls that last milliseconds: many arrivals, few calls at the same time.

use super::*;

/// Connections of the load, and the time from the start of a call to the next one, in milliseconds.
const CONNECTIONS: u64 = 4;
const CYCLE: u64 = 36;
const BURST: u64 = 5_000;
const STEP_MS: u64 = 5_000;

/// The knowledge that the observer has of a burst.
#[derive(Debug, Clone, Copy)]
struct Observer {
    /// Ready pods of the pool.
    ready: u64,
    /// Calls that are live at an observation within the burst.
    live: u64,
    has_durations: bool,
    /// Idle steps before the burst.
    idle_steps: u64,
}

/// Steps a policy through a burst that begins `phase` milliseconds after an observation, and
/// returns the decisions from then on, for two minutes.
fn decisions(observer: Observer, phase: u64) -> Vec<Decision> {
    let Observer { ready, live, has_durations, idle_steps } = observer;
    let mut policy = Policy::new(Settings::default());
    let mut at = MONDAY * 1_000;
    let begins = at + idle_steps * STEP_MS + phase;
    let (mut arrived, mut live_before) = (0, 0);
    let mut decisions = Vec::new();
    while at < begins + 120_000 {
        let within = at.saturating_sub(begins).min(BURST);
        let total = CONNECTIONS * within / CYCLE;
        let is_within = (1..BURST).contains(&within);
        let live = if is_within { live.min(total) } else { 0 };
        let arrivals = total - arrived;
        let ended = arrivals + live_before - live;
        let decision = policy.step(&Observation {
            at,
            arrivals,
            live,
            ready,
            durations: if has_durations { vec![0.02; ended as usize] } else { Vec::new() },
            ..Observation::default()
        });
        if at > begins {
            decisions.push(decision);
        }
        (arrived, live_before) = (total, live);
        at += STEP_MS;
    }
    decisions
}

#[test]
fn a_burst_of_short_calls_needs_few_pods_at_any_phase() {
    // The arrivals of a full pool prove no ended calls: without durations only pools with free
    // slots are expected to tell them from refused ones.
    for (ready, has_durations) in [(1, true), (3, true), (4, true), (20, true), (20, false)] {
        for (live, idle_steps) in [(0, 0), (3, 0), (4, 0), (0, 60), (3, 60), (4, 60)] {
            let observer = Observer { ready, live, has_durations, idle_steps };
            for phase in [0, 100, 500, 1_000, 2_500, 4_000, 4_500, 4_800, 4_900, 4_960] {
                let needed = decisions(observer, phase).iter().map(|it| it.needed).max();
                assert!(needed <= Some(20), "{needed:?} pods, {observer:?}, phase {phase} ms");
            }
        }
    }
}
