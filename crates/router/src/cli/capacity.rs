//! `capacity` and `prescale`: the pods that each pool should have.

use clap::{ArgGroup, Args, Subcommand};
use hyper::Method;
use serde_json::{Value, json};

use super::{
    inspect::{encoded, pretty},
    print,
    router_client::{RouterArgs, request, text},
    table::{short_duration, table},
};
use crate::human_duration::HumanDuration;

#[derive(Debug, Args)]
pub(super) struct CapacityArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    router: RouterArgs,
}

pub(super) async fn capacity(args: CapacityArgs) -> anyhow::Result<()> {
    let answer = request(&args.router.client()?, Method::GET, "/capacity", None).await?;
    if args.json {
        return print(&pretty(&answer));
    }
    let pools = answer["pools"].as_object().into_iter().flatten();
    let fields = [
        "desired",
        "policy",
        "reason",
        "ready",
        "starting",
        "live",
        "waiting",
        "dial_slots",
        "expected_calls",
        "start_up",
        "idle_pod_hours",
    ];
    let row = |(name, pool): (&String, &Value)| {
        let mut row = vec![name.clone()];
        row.extend(fields.map(|field| text(&pool[field])));
        row
    };
    let rows: Vec<Vec<String>> = pools.map(row).collect();
    let titles = [
        "POOL",
        "DESIRED",
        "POLICY",
        "REASON",
        "READY",
        "STARTING",
        "LIVE",
        "WAITING",
        "DIALS",
        "EXPECTED",
        "START-UP (S)",
        "IDLE POD-HOURS",
    ];
    print(&table(&titles, &rows))
}

#[derive(Debug, Args)]
pub(super) struct PrescaleArgs {
    #[command(subcommand)]
    action: Option<PrescaleAction>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(flatten)]
    router: RouterArgs,
}

#[derive(Debug, Subcommand)]
enum PrescaleAction {
    /// Order at least this number of pods in a pool
    #[command(group = ArgGroup::new("end").required(true).args(["time", "until"]))]
    Set {
        /// Tier, or merchant:ID
        pool: String,
        #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
        pods: u32,
        /// Length of the order
        #[arg(long = "for", value_name = "DURATION")]
        time: Option<HumanDuration>,
        /// End of the order: unix seconds, or a time such as 2025-11-16T18:00:00Z
        #[arg(long, value_name = "TIME")]
        until: Option<String>,
    },
    /// Delete an order
    Delete { id: String },
}

pub(super) async fn prescale(args: PrescaleArgs) -> anyhow::Result<()> {
    let client = args.router.client()?;
    match args.action {
        None => {
            let answer = request(&client, Method::GET, "/prescale", None).await?;
            if args.json {
                return print(&pretty(&answer));
            }
            let orders = answer["orders"].as_array().into_iter().flatten();
            let rows: Vec<Vec<String>> = orders.map(order_row).collect();
            print(&table(&["ID", "POOL", "PODS", "ENDS IN"], &rows))
        }
        Some(PrescaleAction::Set { pool, pods, time, until }) => {
            let mut body = json!({"pool": pool, "pods": pods});
            if let Some(time) = time {
                body["for"] = json!(time.to_string());
            }
            if let Some(until) = until {
                body["until"] = until.parse::<u64>().map_or_else(|_| json!(until), |at| json!(at));
            }
            let answer = request(&client, Method::POST, "/prescale", Some(&body)).await?;
            if args.json {
                return print(&pretty(&answer));
            }
            for warning in answer["warnings"].as_array().into_iter().flatten() {
                eprintln!("warning: {}", text(warning));
            }
            let order = &answer["order"];
            let (id, pool, pods) = (text(&order["id"]), text(&order["pool"]), text(&order["pods"]));
            // The end of the order is in whole seconds.
            let left = time.map_or_else(|| ends_in(order), |time| time.to_string());
            print(&format!("order {id}: at least {pods} pods in {pool} for {left}\n"))
        }
        Some(PrescaleAction::Delete { id }) => {
            let path = format!("/prescale/{}", encoded(&id));
            let answer = request(&client, Method::DELETE, &path, None).await?;
            if args.json {
                return print(&pretty(&answer));
            }
            print(&format!("order {id} is deleted\n"))
        }
    }
}

fn order_row(order: &Value) -> Vec<String> {
    vec![text(&order["id"]), text(&order["pool"]), text(&order["pods"]), ends_in(order)]
}

fn ends_in(order: &Value) -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = now.map_or(0, |since| since.as_secs() as i64);
    short_duration(order["until"].as_i64().unwrap_or(0) - now)
}
