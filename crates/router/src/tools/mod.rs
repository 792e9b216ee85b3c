//! Programs to try the router with: a simulated agent and a load generator.

pub mod agent;
pub mod load;
