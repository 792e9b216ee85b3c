//! The capacity planner: Erlang tables, simulation of traces, and the policy as a line filter.

mod chart;
pub mod erlang;
pub mod policies;
pub mod simulate;
pub mod step;
pub mod summary;
pub mod synthetic;
pub mod trace;

pub use self::{
    chart::{Chart, chart},
    simulate::{Call, Outcome, PoolModel},
};
