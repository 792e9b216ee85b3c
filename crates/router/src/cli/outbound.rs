//! `reservations`, `numbers` and `accounts`: outbound calls and their limits.

use clap::{Args, Subcommand};
use hyper::Method;
use serde_json::{Value, json};

use super::{
    inspect::{encoded, pretty},
    print,
    router_client::{RouterArgs, request, text},
    table::{short_duration, table},
};

#[derive(Debug, Args)]
pub(super) struct ReservationsArgs {
    #[command(subcommand)]
    action: Option<ReservationsAction>,
    /// Only reservations of this merchant
    #[arg(long, value_name = "ID")]
    merchant: Option<String>,
    /// Maximum number of reservations
    #[arg(long, default_value = "100", value_parser = clap::value_parser!(u32).range(1..=1_000))]
    limit: u32,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(flatten)]
    router: RouterArgs,
}

#[derive(Debug, Subcommand)]
enum ReservationsAction {
    /// Give a reservation back
    Delete { id: String },
}

pub(super) async fn reservations(args: ReservationsArgs) -> anyhow::Result<()> {
    let client = args.router.client()?;
    if let Some(ReservationsAction::Delete { id }) = args.action {
        let path = format!("/reservations/{}", encoded(&id));
        let answer = request(&client, Method::DELETE, &path, None).await?;
        let done = format!("reservation {id} is given back\n");
        return print(&if args.json { pretty(&answer) } else { done });
    }
    let merchant = args.merchant.map(|id| format!("&merchant={}", encoded(&id)));
    let path = format!("/reservations?limit={}{}", args.limit, merchant.unwrap_or_default());
    let answer = request(&client, Method::GET, &path, None).await?;
    if args.json {
        return print(&pretty(&answer));
    }
    let found = answer["reservations"].as_array().into_iter().flatten();
    let rows: Vec<Vec<String>> = found.map(reservation_row).collect();
    let titles = ["ID", "MERCHANT", "POOL", "NUMBER", "CALL", "ANSWER", "EXPIRES IN"];
    let more = if answer["next"].is_null() { "" } else { "more follow: raise --limit\n" };
    print(&format!("{}{more}", table(&titles, &rows)))
}

fn reservation_row(found: &Value) -> Vec<String> {
    let percent = found["answer_probability"].as_f64().unwrap_or(1.0) * 100.0;
    let mut row: Vec<String> =
        ["id", "merchant_id", "pool", "number", "call_sid"].map(|it| text(&found[it])).into();
    row.extend([format!("{percent:.0}%"), expires_in(found)]);
    row
}

fn expires_in(found: &Value) -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = now.map_or(0.0, |since| since.as_secs_f64());
    short_duration((found["expires_at"].as_f64().unwrap_or(0.0) - now).max(0.0) as i64)
}

#[derive(Debug, Args)]
pub(super) struct NumbersArgs {
    #[command(subcommand)]
    action: Option<NumbersAction>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(flatten)]
    router: RouterArgs,
}

#[derive(Debug, Subcommand)]
enum NumbersAction {
    /// Limit the lines of a number
    Set {
        /// E.164 number or SIP address
        number: String,
        max_lines: u32,
    },
    /// Delete the limit of a number
    Delete { number: String },
}

pub(super) async fn numbers(args: NumbersArgs) -> anyhow::Result<()> {
    let change = args.action.map(|action| match action {
        NumbersAction::Set { number, max_lines } => (number, Some(json!({"max_lines": max_lines}))),
        NumbersAction::Delete { number } => (number, None),
    });
    let titles = ["NUMBER", "MAX LINES", "LINES"];
    limits(&args.router, args.json, change, "numbers", &titles, number_row).await
}

fn number_row(found: &Value) -> Vec<String> {
    ["number", "max_lines", "lines"].map(|field| text(&found[field])).into()
}

#[derive(Debug, Args)]
pub(super) struct AccountsArgs {
    #[command(subcommand)]
    action: Option<AccountsAction>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(flatten)]
    router: RouterArgs,
}

#[derive(Debug, Subcommand)]
enum AccountsAction {
    /// Limit the calls per second of an account
    Set {
        /// Provider, or provider:account
        account: String,
        max_cps: u32,
    },
    /// Delete the limit of an account
    Delete { account: String },
}

pub(super) async fn accounts(args: AccountsArgs) -> anyhow::Result<()> {
    let change = args.action.map(|action| match action {
        AccountsAction::Set { account, max_cps } => (account, Some(json!({"max_cps": max_cps}))),
        AccountsAction::Delete { account } => (account, None),
    });
    let titles = ["ACCOUNT", "MAX CPS", "LAST DIAL"];
    limits(&args.router, args.json, change, "accounts", &titles, account_row).await
}

fn account_row(found: &Value) -> Vec<String> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = now.map_or(0.0, |since| since.as_secs_f64());
    let last = found["last_dial_at"].as_f64();
    let last = last.map(|at| format!("{} ago", short_duration((now - at).max(0.0) as i64)));
    vec![text(&found["account"]), text(&found["max_cps"]), last.unwrap_or_default()]
}

/// Lists the limits under a path, or sets or deletes one.
async fn limits(
    router: &RouterArgs,
    json: bool,
    change: Option<(String, Option<Value>)>,
    path: &str,
    titles: &[&str],
    row: fn(&Value) -> Vec<String>,
) -> anyhow::Result<()> {
    let client = router.client()?;
    let Some((name, body)) = change else {
        let answer = request(&client, Method::GET, &format!("/{path}"), None).await?;
        if json {
            return print(&pretty(&answer));
        }
        let rows: Vec<Vec<String>> =
            answer[path].as_array().into_iter().flatten().map(row).collect();
        return print(&table(titles, &rows));
    };
    let target = format!("/{path}/{}", encoded(&name));
    let (method, done) = match &body {
        Some(_) => (Method::PUT, "set"),
        None => (Method::DELETE, "deleted"),
    };
    let answer = request(&client, method, &target, body.as_ref()).await?;
    print(&if json { pretty(&answer) } else { format!("the limit of {name} is {done}\n") })
}
