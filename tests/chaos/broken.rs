//! Routers that are broken on purpose: what a cell must catch.

use std::time::{SystemTime, UNIX_EPOCH};

use clap::Parser;
use smart_router::{
    app,
    config::{Config, Settings},
};
use store::Scripts;

use super::{cell::Broken, cells::CELLS};
use testkit::baseline::Kind;

#[derive(Parser)]
struct Surroundings {
    #[command(flatten)]
    settings: Settings,
}

/// Serves as the broken build of a cell, until it is killed.
pub(crate) fn serve(cell: &str) -> ! {
    let cell = CELLS.iter().find(|other| other.name == cell).expect("a cell");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        if cell.broken.is_procedure() {
            let port: u16 = std::env::var("HTTP_PORT").unwrap().parse().unwrap();
            let url = std::env::var("REDIS_URL").unwrap();
            testkit::baseline::serve(
                Kind::Mux,
                ([127, 0, 0, 1], port).into(),
                &url,
                "gold basic:3",
            )
            .await;
        }
        let config = Config::new(Surroundings::parse_from(["router"]).settings).expect("settings");
        let running =
            app::start_with(config, scripts(cell.broken)).await.expect("a broken router starts");
        let _running = running;
        std::future::pending::<()>().await;
    });
    unreachable!()
}

fn scripts(broken: Broken) -> Scripts {
    match broken {
        Broken::Edit(edits) => Scripts::edited(|code| {
            edits.iter().fold(code.to_owned(), |code, (what, by)| {
                assert!(code.contains(what), "the scripts do not say {what:?} any more");
                code.replace(what, by)
            })
        }),
        Broken::OwnClock => {
            // What Redis's clock says, moved to where ours is.
            let url = std::env::var("REDIS_URL").unwrap();
            let mut redis = redis::Client::open(url).unwrap().get_connection().unwrap();
            let (seconds, _): (i64, i64) = redis::cmd("TIME").query(&mut redis).unwrap();
            let ours = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
            let shift = (ours - seconds) * 1_000;
            Scripts::edited(|code| {
                let what = "now = seconds * 1000 + floor(clock[2] / 1000)";
                assert!(code.contains(what));
                code.replace(what, &format!("{what} + {shift}"))
            })
        }
        _ => Scripts::default(),
    }
}
