//! The command line.

mod agent;
mod call;
mod change;
mod drain;
mod errors;
mod load;
mod look;
mod router;
mod serve;
mod table;
mod top;

use std::{
    ffi::{OsStr, OsString},
    io::Write,
    process::ExitCode,
    time::Duration,
};

use anyhow::Context;
use clap::{Arg, Args, Command, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::config::{Config, Settings};

/// A call router for voice agents: gives every phone call a pod, exactly once.
///
/// Without a command it serves. Without settings it serves on
/// http://localhost:8080 with an embedded store and simulated agents.
#[derive(Debug, Parser)]
#[command(name = "smart-router", version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Option<Action>,
    #[command(flatten)]
    settings: Settings,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Serve requests; this is what happens without a command
    Serve(Settings),
    /// Print the effective configuration, or what is wrong with it
    CheckConfig(Settings),
    /// How all pools stand
    Status(look::StatusArgs),
    /// All pods and what they do
    Pods(look::PodsArgs),
    /// Live and waiting calls, or the story of one
    Calls(look::CallsArgs),
    /// Pools, rates and events in this terminal, live; once where there is no terminal
    Top(top::TopArgs),
    /// What happened, and what happens
    Events(look::EventsArgs),
    /// Take a pod out of service, and wait for its calls
    Drain(drain::DrainArgs),
    /// Give a pod calls again before its drain or quarantine ends
    Undrain(change::UndrainArgs),
    /// End a call and give its pod back
    Release(change::ReleaseArgs),
    /// What merchants' calls may use: all of them, or get, set, delete
    Merchants(change::MerchantsArgs),
    /// The tiers in force, or set
    Tiers(change::TiersArgs),
    /// Print what completes commands in a shell
    Completions { shell: clap_complete::Shell },
    /// Be one simulated agent, as a process of its own
    Agent(agent::AgentArgs),
    /// Place one call through a running router and tell each step
    Call(call::CallArgs),
    /// Load a running router, and check that it gives no pod twice
    Load(load::LoadArgs),
}

/// Runs the program.
pub fn main() -> ExitCode {
    for variable in variables().iter().filter_map(Arg::get_env) {
        if std::env::var_os(variable).is_some_and(|value| value.to_str().is_none()) {
            eprintln!("smart-router: {}=?: expected text in UTF-8", variable.display());
            return ExitCode::FAILURE;
        }
    }
    let cli = match parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(error) => return errors::report(&error),
    };
    let done = match cli.command {
        None => configure(cli.settings).and_then(|config| block_on(serve::serve(config))),
        Some(Action::Serve(settings)) => {
            configure(settings).and_then(|config| block_on(serve::serve(config)))
        }
        Some(Action::CheckConfig(settings)) => {
            configure(settings).and_then(|config| print_config(&config))
        }
        Some(Action::Status(args)) => block_on(look::status(args)),
        Some(Action::Pods(args)) => block_on(look::pods(args)),
        Some(Action::Calls(args)) => block_on(look::calls(args)),
        Some(Action::Top(args)) => block_on(top::top(args)),
        Some(Action::Events(args)) => block_on(look::events(args)),
        Some(Action::Drain(args)) => block_on(drain::drain(args)),
        Some(Action::Undrain(args)) => block_on(change::undrain(args)),
        Some(Action::Release(args)) => block_on(change::release(args)),
        Some(Action::Merchants(args)) => block_on(change::merchants(args)),
        Some(Action::Tiers(args)) => block_on(change::tiers(args)),
        Some(Action::Completions { shell }) => {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "smart-router", &mut text);
            print(&String::from_utf8_lossy(&text))
        }
        Some(Action::Agent(args)) => block_on(agent::agent(args)),
        Some(Action::Call(args)) => block_on(call::call(args)),
        Some(Action::Load(args)) => block_on(load::load(args)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("smart-router: {error:#}");
            let failed = error.downcast_ref::<router::Failed>();
            failed.map_or(ExitCode::FAILURE, |failed| ExitCode::from(failed.code))
        }
    }
}

/// Prints; who no longer reads has had enough.
fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        printed => printed.context("cannot print"),
    }
}

fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Cli, clap::Error> {
    let matches = with_discreet_variables(Cli::command()).try_get_matches_from(args)?;
    Cli::from_arg_matches(&matches)
}

/// A variable that is set to nothing counts as not set, and no help text shows
/// what a variable holds.
fn with_discreet_variables(command: Command) -> Command {
    let is_empty = |name: &OsStr| std::env::var_os(name).is_some_and(|value| value.is_empty());
    let adapt = |arg: Arg| match arg.get_env().is_some_and(is_empty) {
        true => arg.env(None::<&str>),
        false => arg.hide_env_values(true),
    };
    command.mut_args(adapt).mut_subcommands(with_discreet_variables)
}

fn configure(settings: Settings) -> anyhow::Result<Config> {
    Ok(Config::new(settings)?)
}

fn block_on(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    if std::env::var_os("TOKIO_WORKER_THREADS").is_none() {
        // One is enough for what one Redis can do; more of them wake each other up.
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        runtime.worker_threads((cores / 2).max(1));
    }
    let runtime = runtime.enable_all().build()?;
    let done = runtime.block_on(work);
    // Nobody waits for a disk that does not answer.
    runtime.shutdown_timeout(Duration::from_secs(1));
    done
}

fn print_config(config: &Config) -> anyhow::Result<()> {
    for warning in &config.warnings {
        eprintln!("warning: {warning}");
    }
    let lines = config.describe().into_iter();
    print(&lines.map(|(variable, value)| format!("{variable}={value}\n")).collect::<String>())
}

/// Every setting's variable, in the order of `--help`.
pub fn variables() -> Vec<Arg> {
    let command = Settings::augment_args(Command::new("settings"));
    command.get_arguments().cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
