//! Outbound calls: the arithmetic of reservations, without I/O and clock.
//!
//! `crates/store/lua/common/held.lua` computes the same numbers. The
//! functions use integers and operations on doubles that every platform rounds alike.

mod answer_rate;
mod held;
#[cfg(test)]
mod tests;

pub use self::{
    answer_rate::AnswerRate,
    held::{DialSums, held},
};
