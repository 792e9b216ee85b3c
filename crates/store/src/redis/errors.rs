//! Classifies errors of Redis: retryable, an outage, or permanent.

use redis::{ErrorKind, RedisError};

use crate::StoreError;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    /// No reply: the connection broke, or the reply timed out.
    Io,
    /// This server does not accept the request now: reconnect and retry.
    Redirect,
    /// Redis denies the request until an operator changes permissions: an outage that neither
    /// reconnecting nor retrying resolves.
    Denied,
    /// Redis is out of memory for writes that add data.
    Full,
    /// Redis would refuse the same request again.
    Permanent,
}

pub(super) fn classify(error: &RedisError) -> Class {
    if is_denied(error) {
        return Class::Denied;
    }
    match error.code() {
        None => Class::Io,
        Some(
            "READONLY" | "MOVED" | "ASK" | "LOADING" | "MASTERDOWN" | "CLUSTERDOWN" | "TRYAGAIN"
            | "NOREPLICAS" | "BUSY" | "MISCONF",
        ) => Class::Redirect,
        Some("OOM") => Class::Full,
        Some(_) => Class::Permanent,
    }
}

/// Whether an access control list or a password denies the request. Redis 7.0 reports a command
/// that is denied inside of a function with the code ERR.
fn is_denied(error: &RedisError) -> bool {
    let in_function = |detail: &str| detail.contains("The user executing the script can't");
    error.kind() == ErrorKind::AuthenticationFailed
        || matches!(error.code(), Some("NOPERM" | "NOAUTH" | "WRONGPASS"))
        || error.detail().is_some_and(in_function)
}

/// The cause of an outage in one word, for probes and the dashboard.
pub(super) fn reason(error: &RedisError) -> String {
    match (classify(error), error.code()) {
        (Class::Denied, _) if error.kind() == ErrorKind::AuthenticationFailed => "WRONGPASS".into(),
        (Class::Denied, None | Some("ERR")) => "NOPERM".into(),
        (_, Some(code)) => code.into(),
        (_, None) if error.is_timeout() => "timeout".into(),
        (_, None) => "unreachable".into(),
    }
}

/// The error as callers of the store see it.
pub(super) fn store_error(error: &RedisError) -> StoreError {
    match classify(error) {
        Class::Io | Class::Redirect | Class::Denied => StoreError::Unavailable(error.to_string()),
        Class::Full => StoreError::Full(error.to_string()),
        Class::Permanent => StoreError::Failed(error.to_string()),
    }
}

/// Whether a key has the wrong type.
pub(super) fn is_wrong_type(error: &RedisError) -> bool {
    error.code() == Some("WRONGTYPE")
}

/// Whether the function library is not loaded.
pub(super) fn is_not_loaded(error: &RedisError) -> bool {
    error.code() == Some("ERR")
        && error.detail().is_some_and(|detail| detail.contains("Function not found"))
}
