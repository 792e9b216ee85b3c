//! Broken builds (mutations) of the router, which the cells must detect.

use std::time::{SystemTime, UNIX_EPOCH};

use clap::Parser;
use smart_router::{Config, Settings};
use store::Functions;

use super::cell::{self, Broken};
use testkit::baseline::BaselineKind;

pub(crate) const NO_OWNER_CHECK: Broken = Broken::Edit(&[(
    "    if request_id ~= '' then return {'not_found', now} end\n",
    "    if expected_pod ~= '' then run('DEL', K.pod_calls .. expected_pod) \
     local pod = facts_of(expected_pod) if pod then place(pod) end end\n",
)]);
pub(crate) const NO_OWNER_CHECK_DESCRIPTION: &str =
    "a release frees the named pod without checking its call";
pub(crate) const NO_COMPENSATION: Broken =
    Broken::Edit(&[("    if rest ~= '' then\n", "    if true then\n")]);
pub(crate) const NO_COMPENSATION_DESCRIPTION: &str =
    "no compensating release for an allocation without a delivered reply";
pub(crate) const BASELINE_DESCRIPTION: &str = "separate Redis commands instead of atomic functions";
pub(crate) const NO_FENCING: Broken = Broken::Edit(&[
    ("if epoch < current then", "if false then"),
    ("if not_after ~= '0' and now > tonumber(not_after) then return {'late', now} end", ""),
]);
pub(crate) const NO_FENCING_DESCRIPTION: &str =
    "no fencing: writes with an old epoch or after their deadline are executed";
pub(crate) const NO_LEASE_END: Broken = Broken::Edit(&[(
    "if pod then reassign_and_hand_off(pod, record_call_outcome(pod, cause, time)) end",
    "",
)]);
pub(crate) const NO_LEASE_END_DESCRIPTION: &str = "the end of a lease does not free the pod";

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    settings: Settings,
}

/// Serves as the broken build of a cell until the process is killed.
pub(crate) fn serve(cell: &str) -> ! {
    let cell = cell::all().find(|other| other.name == cell).expect("a cell");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        if cell.broken.is_baseline() {
            let port: u16 = std::env::var("HTTP_PORT").unwrap().parse().unwrap();
            let url = std::env::var("REDIS_URL").unwrap();
            testkit::baseline::serve(
                BaselineKind::Mux,
                ([127, 0, 0, 1], port).into(),
                &url,
                "gold basic:3",
            )
            .await;
        }
        let config = Config::new(Arguments::parse_from(["router"]).settings).expect("settings");
        let running = smart_router::start_with(config, functions(cell.broken))
            .await
            .expect("a broken router starts");
        let _running = running;
        std::future::pending::<()>().await;
    });
    unreachable!()
}

/// Checks that every broken build can be built. An edit of a text that the functions no longer
/// contain would otherwise show only in the nightly run.
pub(crate) fn check_edits() {
    for cell in cell::all() {
        if let Broken::Edit(_) = cell.broken {
            functions(cell.broken);
        }
    }
}

fn functions(broken: Broken) -> Functions {
    match broken {
        Broken::Edit(edits) => Functions::edited(|code| {
            edits.iter().fold(code.to_owned(), |code, (from, to)| {
                assert!(code.contains(from), "the Redis functions do not contain {from:?}");
                code.replace(from, to)
            })
        }),
        Broken::LocalClock => {
            // Shifts Redis's clock to the router's clock.
            let url = std::env::var("REDIS_URL").unwrap();
            let mut redis = redis::Client::open(url).unwrap().get_connection().unwrap();
            let (seconds, _): (i64, i64) = redis::cmd("TIME").query(&mut redis).unwrap();
            let local = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
            let shift = (local - seconds) * 1_000;
            Functions::edited(|code| {
                let what = "now = seconds * 1000 + floor(clock[2] / 1000)";
                assert!(code.contains(what));
                code.replace(what, &format!("{what} + {shift}"))
            })
        }
        _ => Functions::default(),
    }
}
