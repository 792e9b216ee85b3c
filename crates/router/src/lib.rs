//! A call router for voice agents; `docs/architecture.md` gives the overview.

pub mod app;
pub mod auth;
pub mod capacity;
pub mod cli;
mod client;
mod client_limits;
pub mod cluster;
pub mod config;
pub mod control;
mod hold_config;
pub mod http;
mod human_duration;
mod lifecycle;
pub mod media;
mod open_files;
mod telemetry;
mod terminal;
mod tls;
pub mod tools;
mod trusted_proxies;
mod watched_file;

/// Returns an unpredictable number. `RandomState` is seeded by the operating system, which is
/// enough for ids of requests and calls.
fn random_u32() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(()) as u32
}
