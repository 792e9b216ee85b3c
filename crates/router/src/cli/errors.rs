//! Reports invalid values of flags and variables, one line each.

use std::process::ExitCode;

use clap::{
    Command, CommandFactory, Error,
    error::{ContextKind, ContextValue, ErrorKind},
};

use super::Cli;
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
    let flag = flag.split_whitespace().next()?;
    let variable = variable_of(flag.trim_start_matches("--")).unwrap_or_else(|| flag.to_owned());
    let value = text(ContextKind::InvalidValue)?;
    // An invalid URL may contain a password that can't be located.
    let shown = match variable.as_str() {
        "REDIS_URL" => "(hidden)".into(),
        _ if value.contains("://") => without_password(&value),
        _ => value,
    };
    let expected = match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(valid)) => valid.join(" or "),
        _ => numbers(std::error::Error::source(error).map(ToString::to_string)?),
    };
    Some(ConfigError { variable, value: shown, expected })
}

/// The variable of a flag; most flags of commands have none.
fn variable_of(flag: &str) -> Option<String> {
    let command = Cli::command();
    let commands = std::iter::once(&command).chain(command.get_subcommands());
    let mut args = commands.flat_map(Command::get_arguments);
    let variable = args.find_map(|arg| arg.get_env().filter(|_| arg.get_long() == Some(flag)))?;
    Some(variable.to_string_lossy().into_owned())
}

/// Clap's parser of numbers describes the value instead of the expected ones.
fn numbers(error: String) -> String {
    let range = error.split_once(" is not in ").and_then(|(_, range)| range.split_once("..="));
    match range {
        Some((from, to)) => format!("a whole number from {from} to {to}"),
        None if error.starts_with("invalid digit") => "a whole number".into(),
        None => error,
    }
}
