//! Programs to try the router with: a simulated agent, a simulated provider and a load generator.

pub mod agent;
pub mod load;
pub mod provider_stream;
