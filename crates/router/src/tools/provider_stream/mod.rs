//! The provider's side of a media stream, for test calls: its messages, a WebSocket client that
//! sends them at the pace of a call, and the checks of the agent's echo.
//!
//! The section "Media stream" of `docs/providers/*.md` describes the messages and their sources.

mod clip;
mod dialer;
mod echoes;
mod format;
mod marker;
mod messages;
mod mulaw;
mod session;
mod similarity;
mod wav;

pub use self::{
    clip::{Clip, Heard, Recording},
    dialer::Dialer,
    echoes::Echoes,
    format::MediaFormat,
    session::{Echo, ProviderStream, StreamError},
    similarity::Similarity,
};
