//! The capacity planner: Erlang tables, simulation of traces, and the policy as a line filter.

mod chart;
pub(crate) mod erlang;
pub(crate) mod policies;
pub(super) mod simulate;
pub(crate) mod step;
pub(crate) mod summary;
pub(super) mod synthetic;
pub(crate) mod trace;

pub(crate) use self::{
    chart::{Chart, chart},
    simulate::PoolModel,
};
