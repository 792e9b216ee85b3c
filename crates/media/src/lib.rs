//! The parts of the media gateway that carry one stream: the token in its URL, the WebSocket
//! handshakes with provider and agent, and the relay of frames between them. No HTTP server and
//! no store: the router admits streams and records their ends.

mod direction;
pub mod frame;
pub mod handshake;
pub mod opening;
pub mod relay;
pub mod stats;
pub mod token;

#[cfg(test)]
mod tests;
