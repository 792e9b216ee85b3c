//! The rules of the router, without I/O, clock or async: names, tiers, chains, and the fleet.
//! The fleet is the reference for both stores.

mod assignment;
mod fleet;
pub mod merchant;
pub mod names;
pub mod rules;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tiers;

pub use self::fleet::*;

/// A point in time: milliseconds since the Unix epoch, by the store's clock.
pub type Millis = u64;
