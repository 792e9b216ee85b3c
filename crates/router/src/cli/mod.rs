//! The command line.

mod agent;
mod call;
mod call_pods;
mod capacity;
mod drain;
mod errors;
mod event_line;
mod inspect;
mod load;
mod manage;
mod outbound;
mod plan;
mod router_client;
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

use crate::config::{self, Config, ProcessRole, Settings};

/// A call router for voice agents: gives every phone call a pod, exactly once.
///
/// Without a command, runs `serve`. Without settings, serves on http://localhost:8080 with an
/// embedded store and simulated agents.
#[derive(Debug, Parser)]
#[command(name = "smart-router", version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Action>,
    #[command(flatten)]
    settings: Settings,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Serve requests (default)
    Serve(Settings),
    /// Serve only the media streams of routers on the same Redis, with probes and metrics
    Media(Settings),
    /// Print the effective configuration, or the first invalid setting
    CheckConfig(CheckConfigArgs),
    /// Show all pools with their pods and calls
    Status(inspect::StatusArgs),
    /// List pods with their state and calls
    Pods(inspect::PodsArgs),
    /// List live or waiting calls, or show the events of one call
    Calls(inspect::CallsArgs),
    /// Show pools, rates and events live; without a terminal, print them once
    Top(top::TopArgs),
    /// Show recent events; --follow streams new ones
    Events(inspect::EventsArgs),
    /// Drain a pod; --wait waits until it has no calls
    Drain(drain::DrainArgs),
    /// End the drain or quarantine of a pod
    Undrain(manage::UndrainArgs),
    /// Release a call and free its pod
    Release(manage::ReleaseArgs),
    /// List merchant documents, or get, set or delete one
    Merchants(manage::MerchantsArgs),
    /// Show the tiers in force, or set them
    Tiers(manage::TiersArgs),
    /// Show the pods that each pool should have, and why
    Capacity(capacity::CapacityArgs),
    /// List prescale orders, or set or delete one
    Prescale(capacity::PrescaleArgs),
    /// List outstanding reservations of diallers, or give one back
    Reservations(outbound::ReservationsArgs),
    /// List numbers with a limit of lines, or set or delete a limit
    Numbers(outbound::NumbersArgs),
    /// List provider accounts with a limit of calls per second, or set or delete a limit
    Accounts(outbound::AccountsArgs),
    /// Print a completion script for a shell
    Completions { shell: clap_complete::Shell },
    /// Run one simulated agent
    Agent(agent::AgentArgs),
    /// Place one test call through a running router, and print each step
    Call(call::CallArgs),
    /// Generate load on a running router, and check that no pod is allocated twice
    Load(load::LoadArgs),
    /// Calculate how many pods a demand needs: Erlang tables, a simulated trace, or a filter
    Plan(plan::PlanArgs),
}

#[derive(Debug, Args)]
struct CheckConfigArgs {
    /// Print the reference of all settings (Markdown) instead
    #[arg(long)]
    reference: bool,
    /// Check the settings of `smart-router media`
    #[arg(long)]
    media: bool,
    #[command(flatten)]
    settings: Settings,
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
        None => run(cli.settings, ProcessRole::Router),
        Some(Action::Serve(settings)) => run(settings, ProcessRole::Router),
        Some(Action::Media(settings)) => run(settings, ProcessRole::Media),
        Some(Action::CheckConfig(args)) if args.reference => print(&config::reference()),
        Some(Action::CheckConfig(args)) => {
            let role = if args.media { ProcessRole::Media } else { ProcessRole::Router };
            configure(args.settings, role).and_then(|config| print_config(&config))
        }
        Some(Action::Status(args)) => block_on(inspect::status(args)),
        Some(Action::Pods(args)) => block_on(inspect::pods(args)),
        Some(Action::Calls(args)) => block_on(inspect::calls(args)),
        Some(Action::Top(args)) => block_on(top::top(args)),
        Some(Action::Events(args)) => block_on(inspect::events(args)),
        Some(Action::Drain(args)) => block_on(drain::drain(args)),
        Some(Action::Undrain(args)) => block_on(manage::undrain(args)),
        Some(Action::Release(args)) => block_on(manage::release(args)),
        Some(Action::Merchants(args)) => block_on(manage::merchants(args)),
        Some(Action::Tiers(args)) => block_on(manage::tiers(args)),
        Some(Action::Capacity(args)) => block_on(capacity::capacity(args)),
        Some(Action::Prescale(args)) => block_on(capacity::prescale(args)),
        Some(Action::Reservations(args)) => block_on(outbound::reservations(args)),
        Some(Action::Numbers(args)) => block_on(outbound::numbers(args)),
        Some(Action::Accounts(args)) => block_on(outbound::accounts(args)),
        Some(Action::Completions { shell }) => {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "smart-router", &mut text);
            print(&String::from_utf8_lossy(&text))
        }
        Some(Action::Agent(args)) => block_on(agent::agent(args)),
        Some(Action::Call(args)) => block_on(call::call(args)),
        Some(Action::Load(args)) => block_on(load::load(args)),
        Some(Action::Plan(args)) => plan::plan(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("smart-router: {error:#}");
            let failed = error.downcast_ref::<router_client::Failed>();
            failed.map_or(ExitCode::FAILURE, |failed| ExitCode::from(failed.code))
        }
    }
}

/// Prints to standard output; a closed pipe ends the program without an error.
fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        printed => printed.context("cannot print"),
    }
}

fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Cli, clap::Error> {
    let matches = with_hidden_values(Cli::command()).try_get_matches_from(args)?;
    Cli::from_arg_matches(&matches)
}

/// Treats an empty variable as unset, and hides the values of variables in help texts.
fn with_hidden_values(command: Command) -> Command {
    let is_empty = |name: &OsStr| std::env::var_os(name).is_some_and(|value| value.is_empty());
    let adapt = |arg: Arg| match arg.get_env().is_some_and(is_empty) {
        true => arg.env(None::<&str>),
        false => arg.hide_env_values(true),
    };
    command.mut_args(adapt).mut_subcommands(with_hidden_values)
}

fn configure(settings: Settings, role: ProcessRole) -> anyhow::Result<Config> {
    Ok(Config::for_role(settings, role)?)
}

/// Serves the role until a signal stops it.
fn run(settings: Settings, role: ProcessRole) -> anyhow::Result<()> {
    block_on(serve::serve(configure(settings, role)?))
}

fn block_on(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    if std::env::var_os("TOKIO_WORKER_THREADS").is_none() {
        // Half the cores saturate one Redis; more threads only wake each other up.
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        runtime.worker_threads((cores / 2).max(1));
    }
    let runtime = runtime.enable_all().build()?;
    let done = runtime.block_on(work);
    // A blocked disk must not block the exit.
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

/// Returns the settings as arguments, in the order of `--help`.
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
