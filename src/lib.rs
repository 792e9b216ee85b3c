//! A call router for voice agents. `docs/architecture.md` shows the whole.

pub mod domain;
pub mod store;
