//! Programs to try the router with: a simulated agent, a simulated provider, a load generator and
//! a capacity planner.

pub mod agent;
pub mod load;
pub mod plan;
pub mod provider_stream;
