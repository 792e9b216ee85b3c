//! Test support for this crate and the stores (feature `testing`): random operations and the
//! invariant checker.

pub mod dice;
pub mod invariants;
pub mod operations;
mod outbound_invariants;
mod outbound_operations;
