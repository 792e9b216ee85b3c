//! Middleware: rate limit, stream limit, authentication, request bodies, access log, spans.

pub(super) mod access_log;
pub(super) mod auth;
pub(super) mod body;
pub(super) mod rate_limit;
pub(super) mod spans;
pub(crate) mod stream_limit;
