//! Limits of clients, which the HTTP server and the media gateway share.

mod connection_limit;
mod rate_limiter;
mod timeout_io;

pub(crate) use self::{
    connection_limit::{ConnectionLimiter, Phase, Slot},
    rate_limiter::{RateLimiter, network_of},
    timeout_io::TimeoutIo,
};
