//! Capacity: the number of pods that a pool needs, forecast from its own calls.
//!
//! [`Policy`] is a state machine without I/O and clock. `docs/capacity.md` explains it.

mod calendar;
mod distribution;
mod durations;
mod margin;
mod observation;
mod policy;
mod profile;
mod rate;
mod scale_down;
mod start_up;
#[cfg(test)]
mod tests;

pub use self::{
    calendar::Zone,
    distribution::normal_quantile,
    observation::{Bounds, Decision, Observation, Outlook, Prescale, Reason},
    policy::{Policy, Settings, State},
    scale_down::{PodStage, ScaleMemory, ScalePlan, ScaledPod, ScaledPool, plan},
    start_up::MAX_START_UP,
};
