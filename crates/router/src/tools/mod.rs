//! Programs for trying the router: a simulated agent and a load generator.

pub mod agent;
pub mod load;
