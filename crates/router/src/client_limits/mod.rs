//! Limits of clients, which the HTTP server and the media gateway share.

mod connection_limit;
mod rate_limiter;
mod timeout_io;

pub use self::rate_limiter::RateLimiter;
pub(crate) use self::{
    connection_limit::{ConnectionLimiter, Phase, Slot},
    rate_limiter::network_of,
    timeout_io::TimeoutIo,
};
