//! A call router for voice agents. `docs/architecture.md` shows the whole.

pub mod app;
pub mod auth;
pub mod cli;
mod client;
pub mod cluster;
pub mod config;
pub mod control;
pub mod http;
mod lifecycle;
mod networks;
mod telemetry;
mod terminal;
mod tls;
pub mod tools;
mod watched_file;

/// A number nobody can guess from another one. `RandomState` is seeded by the
/// operating system, which is all that ids of requests and calls need.
fn random_u32() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id()) as u32
}
