//! Programs to try the router with: a simulated agent, a simulated provider, a load generator and
//! a capacity planner.

pub(crate) mod agent;
pub mod load;
pub(crate) mod plan;
pub mod provider_stream;
