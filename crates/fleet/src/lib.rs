//! The rules of the router, without I/O, clock or async: names, tiers, chains, capacity, and the
//! fleet. The fleet is the reference for both stores.

mod assignment;
pub mod capacity;
mod fleet;
pub mod manifests;
pub mod merchant;
pub mod names;
pub mod outbound;
pub mod rules;
mod step;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tiers;
pub mod workload;

pub use self::{assignment::default_pool, fleet::*, step::Step};

/// A point in time: milliseconds since the Unix epoch, by the store's clock.
pub type Millis = u64;
