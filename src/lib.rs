//! A call router for voice agents. `docs/architecture.md` shows the whole.

pub mod access;
pub mod agent;
pub mod app;
pub mod certificate;
pub mod cli;
pub mod client;
pub mod cluster;
pub mod config;
pub mod control;
pub mod domain;
pub mod followed;
pub mod http;
pub mod lifecycle;
pub mod load;
pub mod logging;
pub mod metrics;
pub mod networks;
pub mod secrets;
pub mod store;
pub mod telephony;
pub mod terminal;
pub mod tls;
pub mod traces;

/// A number nobody can guess from another one. `RandomState` is seeded by the
/// operating system, which is all that ids of requests and calls need.
fn random_u32() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id()) as u32
}
