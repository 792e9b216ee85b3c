//! Differential test of the Redis functions and the fleet model: random operations on both, and
//! mutations of the functions that the comparison must detect.

#[macro_use]
mod compare;
mod call_history;
mod capacity;
mod dials;
mod failover_mutations;
mod keys;
mod mutations;
mod outbound;
mod scaling_mutations;
mod schema;
mod stream_mutations;
