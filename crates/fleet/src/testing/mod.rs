//! Shared by the tests of this crate and of the stores (feature `testing`): random operations,
//! and the invariants of a state.

pub mod dice;
pub mod invariants;
pub mod operations;
