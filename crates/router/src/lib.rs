//! A call router for voice agents; `docs/architecture.md` gives the overview.

mod app;
mod auth;
mod capacity;
pub mod cli;
mod client;
mod client_limits;
mod cluster;
mod config;
mod control;
pub mod fuzz_targets;
mod hold_config;
mod http;
mod human_duration;
mod lifecycle;
mod media;
#[cfg(test)]
mod module_cycles;
mod open_files;
mod telemetry;
mod terminal;
mod tls;
pub mod tools;
mod trusted_proxies;
mod watched_file;

pub use self::{
    app::{Running, start, start_with},
    config::{Config, Settings},
};

/// Returns an unpredictable number. `RandomState` is seeded by the operating system, which is
/// enough for ids of requests and calls.
fn random_u32() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(()) as u32
}
