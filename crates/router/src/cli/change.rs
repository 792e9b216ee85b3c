//! `undrain`, `release`, `merchants`, `tiers`: what people change by hand.

use std::{io::Read, path::PathBuf};

use anyhow::Context;
use clap::{Args, Subcommand};
use hyper::Method;
use serde_json::{Value, json};

use super::{
    look::{encoded, pretty},
    print,
    router::{RouterArgs, all_pages, ask, text},
    table::table,
};

#[derive(Debug, Args)]
pub(super) struct UndrainArgs {
    /// The pod
    #[arg(value_name = "POD")]
    pod_name: String,
    /// For machines
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    router: RouterArgs,
}

pub(super) async fn undrain(args: UndrainArgs) -> anyhow::Result<()> {
    let body = json!({"pod_name": args.pod_name});
    let answer = ask(&args.router.client()?, Method::POST, "/undrain", Some(&body)).await?;
    if args.json {
        return print(&pretty(&answer));
    }
    print(&format!("{}: {}\n", args.pod_name, text(&answer["message"])))
}

#[derive(Debug, Args)]
pub(super) struct ReleaseArgs {
    /// The call
    #[arg(value_name = "CALL")]
    call_sid: String,
    /// Only if it is on this pod
    #[arg(long, value_name = "NAME")]
    pod: Option<String>,
    /// For machines
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
    let answer = ask(&args.router.client()?, Method::POST, "/release", Some(&body)).await?;
    if args.json {
        return print(&pretty(&answer));
    }
    let what = match answer["pod_name"].as_str() {
        Some(pod) => format!("has given {pod} back to {}", text(&answer["released_to_pool"])),
        None => "no longer waits".into(),
    };
    print(&format!("{} {what}\n", args.call_sid))
}

#[derive(Debug, Args)]
pub(super) struct MerchantsArgs {
    #[command(subcommand)]
    what: Option<MerchantAction>,
    /// For machines
    #[arg(long, global = true)]
    json: bool,
    #[command(flatten)]
    router: RouterArgs,
}

#[derive(Debug, Subcommand)]
enum MerchantAction {
    /// Show one document
    Get { id: String },
    /// Write a document, from a file or from standard input (-)
    Set { id: String, file: PathBuf },
    /// Take a document away
    Delete { id: String },
}

pub(super) async fn merchants(args: MerchantsArgs) -> anyhow::Result<()> {
    let client = args.router.client()?;
    let at = |id: &str| format!("/merchants/{}", encoded(id));
    match args.what {
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
            print(&pretty(&ask(&client, Method::GET, &at(&id), None).await?))
        }
        Some(MerchantAction::Set { id, file }) => {
            let answer = ask(&client, Method::PUT, &at(&id), Some(&document(&file)?)).await?;
            if args.json {
                return print(&pretty(&answer));
            }
            warn(&answer);
            print(&format!("{id} is set\n"))
        }
        Some(MerchantAction::Delete { id }) => {
            let answer = ask(&client, Method::DELETE, &at(&id), None).await?;
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
    what: Option<TierAction>,
    /// For machines
    #[arg(long, global = true)]
    json: bool,
    #[command(flatten)]
    router: RouterArgs,
}

#[derive(Debug, Subcommand)]
enum TierAction {
    /// Show the document in force
    Get,
    /// Put a tier document in force, from a file or from standard input (-)
    Set {
        file: PathBuf,
        /// Only say which pods would move
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
    match args.what {
        None | Some(TierAction::Get) => {
            let tiers = ask(&client, Method::GET, "/tiers", None).await?;
            if args.json || args.what.is_some() {
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
            print(&format!("{table}\ncalls try {}\n", chain.join(", ")))
        }
        Some(TierAction::Set { file, dry_run }) => {
            let path = if dry_run { "/tiers?dry_run=true" } else { "/tiers" };
            let answer = ask(&client, Method::PUT, path, Some(&document(&file)?)).await?;
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

/// A JSON document, from a file or from standard input.
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
