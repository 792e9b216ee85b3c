//! Differential test of the Redis functions and the fleet model: random operations on both, and
//! mutations of the functions that the comparison must detect.

#[macro_use]
mod compare;
mod call_history;
mod capacity;
mod dial_scenario;
mod dials;
mod failover_mutations;
mod keys;
mod mutations;
mod operations;
mod outbound;
mod scaling_mutations;
mod schema;
mod stream_mutations;
mod usual_case_mutations;
mod usual_case_series;

/// The nightly run applies the mutations; a change of the library must not silently disable them.
#[test]
fn every_broken_function_differs_from_the_library() {
    let library = &store::Functions::default().schema_2.library;
    for (description, from, to) in mutations::mutations() {
        assert!(library.code.contains(from), "{description}: the library lacks {from:?}");
        assert_ne!(from, to, "{description}");
    }
}
