//! How often the router asks for memory to answer a request: counted, so that a change
//! that makes the path of a call dearer has to say so here. In a binary of its own,
//! because the allocator is counted with.

use std::net::SocketAddr;

use clap::Parser;
use serde_json::json;
use smart_router::{
    app,
    config::{Config, Settings},
};

use testkit::{Connection, redis::RedisServer};

const CALLS: usize = 500;

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    settings: Settings,
}

/// Allocates so many calls.
fn allocate(address: SocketAddr, name: &str) -> Vec<serde_json::Value> {
    let mut connection = Connection::open(address);
    let sids = (0..CALLS).map(|number| json!({"call_sid": format!("{name}-{number}")}));
    let sids: Vec<_> = sids.collect();
    for sid in &sids {
        assert_eq!(connection.post("/api/v1/allocate", sid).status, 200);
    }
    sids
}

/// Releases them.
fn release(address: SocketAddr, sids: &[serde_json::Value]) {
    let mut connection = Connection::open(address);
    for sid in sids {
        assert_eq!(connection.post("/api/v1/release", sid).status, 200);
    }
}

/// Allocations of this thread, which runs the whole router, while another makes requests.
fn counted<T: Send + 'static>(
    runtime: &tokio::runtime::Runtime,
    requests: impl FnOnce() -> T + Send + 'static,
) -> (f64, T) {
    let mut done = None;
    let counted = allocation_counter::measure(|| {
        runtime.block_on(async {
            done = Some(tokio::task::spawn_blocking(requests).await.unwrap());
        });
    });
    (counted.count_total as f64 / CALLS as f64, done.unwrap())
}

#[test]
fn the_path_of_a_call_asks_for_memory_so_many_times() {
    let server = RedisServer::start(&[]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let url = server.url();
    // Counted: 60 and 57 (1 and 3 of them for events), 80 and 72. What the router does beside
    // requests adds a little.
    for (store, most) in [(None, [62.0, 59.0]), (Some(url.as_str()), [82.0, 74.0])] {
        let tiers = format!(r#"{{"gold": {}}}"#, 2 * CALLS);
        let mut arguments = vec!["smart-router", "--http-port", "0", "--metrics-port", "0"];
        arguments.extend(["--tier-config", &tiers]);
        arguments.extend(store.iter().flat_map(|url| ["--redis-url", url]));
        let settings = Arguments::try_parse_from(arguments).unwrap().settings;
        let running = runtime.block_on(app::start(Config::new(settings).unwrap())).unwrap();
        let address = running.api;
        let (_, warm) = counted(&runtime, move || allocate(address, "warm"));
        counted(&runtime, move || release(address, &warm));
        let (given, sids) = counted(&runtime, move || allocate(address, "call"));
        let (freed, ()) = counted(&runtime, move || release(address, &sids));
        println!("{store:?}: allocate {given:.1}, release {freed:.1}");
        assert!(given <= most[0] && freed <= most[1], "{given} and {freed}, at most {most:?}");
        runtime.block_on(running.stop());
    }
}
