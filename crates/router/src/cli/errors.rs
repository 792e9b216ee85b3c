//! Reports invalid values of flags and variables, one line each.

use std::process::ExitCode;

use clap::{
    Error,
    error::{ContextKind, ContextValue, ErrorKind},
};

use crate::config::{ConfigError, without_password};

/// Prints an error, in one line if a value is invalid; returns the exit code.
pub(super) fn report(error: &Error) -> ExitCode {
    match invalid_value(error) {
        Some(invalid) => {
            eprintln!("smart-router: {invalid}");
            ExitCode::FAILURE
        }
        None => {
            let _ = error.print();
            ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(1))
        }
    }
}

fn invalid_value(error: &Error) -> Option<ConfigError> {
    if !matches!(error.kind(), ErrorKind::ValueValidation | ErrorKind::InvalidValue) {
        return None;
    }
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    let flag = text(ContextKind::InvalidArg)?;
    let name = flag.split_whitespace().next()?.trim_start_matches("--").to_owned();
    let variable = name.replace('-', "_").to_uppercase();
    let value = text(ContextKind::InvalidValue)?;
    // An invalid URL may contain a password that can't be located.
    let shown = match variable.as_str() {
        "REDIS_URL" => "(hidden)".into(),
        _ if value.contains("://") => without_password(&value),
        _ => value,
    };
    let expected = match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(valid)) => valid.join(" or "),
        _ => std::error::Error::source(error).map(ToString::to_string)?,
    };
    Some(ConfigError { variable, value: shown, expected })
}
