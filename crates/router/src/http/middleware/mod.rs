//! Middleware: rate limit, stream limit, authentication, request bodies, access log, spans.

pub mod access_log;
pub mod auth;
pub mod body;
pub mod rate_limit;
pub mod spans;
pub mod stream_limit;
