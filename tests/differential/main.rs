//! The Redis functions and the fleet model agree: random operations on both, and proof that
//! the comparison notices functions that are broken on purpose.

#[macro_use]
mod compare;
mod keys;
mod mutations;
