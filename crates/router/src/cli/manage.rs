//! `undrain`, `release`, `merchants`, `tiers`: commands that change state.

use std::{io::Read, path::PathBuf};

use anyhow::Context;
use clap::{Args, Subcommand};
use hyper::Method;
use serde_json::{Value, json};

use super::{
    inspect::{encoded, pretty},
    print,
    router_client::{RouterArgs, all_pages, request, text},
    table::table,
};

#[derive(Debug, Args)]
pub(super) struct UndrainArgs {
    /// Pod to return to service
    #[arg(value_name = "POD")]
    pod_name: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    router: RouterArgs,
}

pub(super) async fn undrain(args: UndrainArgs) -> anyhow::Result<()> {
    let body = json!({"pod_name": args.pod_name});
    let answer = request(&args.router.client()?, Method::POST, "/undrain", Some(&body)).await?;
    if args.json {
        return print(&pretty(&answer));
    }
    print(&format!("{}: {}\n", args.pod_name, text(&answer["message"])))
}

#[derive(Debug, Args)]
pub(super) struct ReleaseArgs {
    /// Call to release
    #[arg(value_name = "CALL")]
    call_sid: String,
    /// Release only if the call is on this pod
    #[arg(long, value_name = "NAME")]
    pod: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    router: RouterArgs,
}

pub(super) async fn release(args: ReleaseArgs) -> anyhow::Result<()> {
    let mut body = json!({"call_sid": args.call_sid});
    if let Some(pod) = &args.pod {
        body["pod_name"] = json!(pod);
    }
    let answer = request(&args.router.client()?, Method::POST, "/release", Some(&body)).await?;
    if args.json {
        return print(&pretty(&answer));
    }
    let outcome = match answer["pod_name"].as_str() {
        Some(_) if answer["ending"] == true => "is ending: its stream is being closed".into(),
        Some(pod) => format!("is released; {pod} is back in {}", text(&answer["released_to_pool"])),
        None => "is removed from the queue".into(),
    };
    print(&format!("{} {outcome}\n", args.call_sid))
}

#[derive(Debug, Args)]
pub(super) struct MerchantsArgs {
    #[command(subcommand)]
    action: Option<MerchantAction>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(flatten)]
    router: RouterArgs,
}

#[derive(Debug, Subcommand)]
enum MerchantAction {
    /// Print one document
    Get { id: String },
    /// Write a document from a file, or from standard input (-)
    Set { id: String, file: PathBuf },
    /// Delete a document
    Delete { id: String },
}

pub(super) async fn merchants(args: MerchantsArgs) -> anyhow::Result<()> {
    let client = args.router.client()?;
    let path_of = |id: &str| format!("/merchants/{}", encoded(id));
    match args.action {
        None => {
            let found = all_pages(&client, "/merchants", "merchants", usize::MAX).await?;
            if args.json {
                return print(&pretty(&Value::Array(found)));
            }
            let rows: Vec<Vec<String>> = found
                .iter()
                .map(|it| vec![text(&it["merchant_id"]), it["document"].to_string()])
                .collect();
            print(&table(&["MERCHANT", "DOCUMENT"], &rows))
        }
        Some(MerchantAction::Get { id }) => {
            print(&pretty(&request(&client, Method::GET, &path_of(&id), None).await?))
        }
        Some(MerchantAction::Set { id, file }) => {
            let answer =
                request(&client, Method::PUT, &path_of(&id), Some(&document(&file)?)).await?;
            if args.json {
                return print(&pretty(&answer));
            }
            warn(&answer);
            print(&format!("{id} is set\n"))
        }
        Some(MerchantAction::Delete { id }) => {
            let answer = request(&client, Method::DELETE, &path_of(&id), None).await?;
            if args.json {
                return print(&pretty(&answer));
            }
            print(&format!("{id} is deleted\n"))
        }
    }
}

#[derive(Debug, Args)]
pub(super) struct TiersArgs {
    #[command(subcommand)]
    action: Option<TierAction>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(flatten)]
    router: RouterArgs,
}

#[derive(Debug, Subcommand)]
enum TierAction {
    /// Print the tier document in force
    Get,
    /// Apply a tier document from a file, or from standard input (-)
    Set {
        file: PathBuf,
        /// Print the pods that would move, and change nothing
        #[arg(long)]
        dry_run: bool,
    },
}

fn warn(answer: &Value) {
    for warning in answer["warnings"].as_array().into_iter().flatten() {
        eprintln!("warning: {}", text(warning));
    }
}

pub(super) async fn tiers(args: TiersArgs) -> anyhow::Result<()> {
    let client = args.router.client()?;
    match args.action {
        None | Some(TierAction::Get) => {
            let tiers = request(&client, Method::GET, "/tiers", None).await?;
            if args.json || args.action.is_some() {
                return print(&pretty(&tiers));
            }
            let all = tiers["tiers"].as_object().into_iter().flatten();
            let field = |tier: &Value, name: &str| text(&tier[name]);
            let rows: Vec<Vec<String>> = all
                .map(|(name, tier)| {
                    let of = ["type", "target", "max_concurrent", "strategy"];
                    let mut row = vec![name.clone()];
                    row.extend(of.map(|name| field(tier, name)));
                    row
                })
                .collect();
            let chain = tiers["default_chain"].as_array().into_iter().flatten();
            let chain: Vec<String> = chain.map(text).collect();
            let table = table(&["TIER", "TYPE", "TARGET", "CALLS/POD", "STRATEGY"], &rows);
            let owner = tiers["managed_by"].as_str();
            let owner = owner.map(|owner| format!("managed by {owner}\n")).unwrap_or_default();
            print(&format!("{table}\ndefault chain: {}\n{owner}", chain.join(", ")))
        }
        Some(TierAction::Set { file, dry_run }) => {
            let path = if dry_run { "/tiers?dry_run=true" } else { "/tiers" };
            let answer = request(&client, Method::PUT, path, Some(&document(&file)?)).await?;
            if args.json {
                return print(&pretty(&answer));
            }
            warn(&answer);
            if !dry_run {
                return print("the tiers are in force\n");
            }
            let moves = answer["moves"].as_array().into_iter().flatten();
            let rows: Vec<Vec<String>> = moves
                .map(|it| {
                    let when = if it["is_busy"] == true { "after its calls" } else { "at once" };
                    vec![text(&it["pod_name"]), text(&it["from"]), text(&it["to"]), when.into()]
                })
                .collect();
            if rows.is_empty() {
                return print("no pod would move\n");
            }
            print(&table(&["POD", "FROM", "TO", "WHEN"], &rows))
        }
    }
}

/// Reads a JSON document from a file or from standard input.
fn document(file: &PathBuf) -> anyhow::Result<Value> {
    let text = if file.as_os_str() == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("standard input")?;
        text
    } else {
        std::fs::read_to_string(file).with_context(|| file.display().to_string())?
    };
    serde_json::from_str(&text).with_context(|| format!("{} is not JSON", file.display()))
}
