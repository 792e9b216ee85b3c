//! Counts heap allocations per request, so that a change of the hot path is noticed. It is a separate
//! binary because it replaces the global allocator.

use std::net::SocketAddr;

use clap::Parser;
use serde_json::json;
use smart_router::{Config, Settings};

use testkit::{Connection, redis::RedisServer};

const CALLS: usize = 500;

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    settings: Settings,
}

/// Allocates [`CALLS`] calls.
fn allocate(address: SocketAddr, name: &str) -> Vec<serde_json::Value> {
    let mut connection = Connection::open(address);
    let sids = (0..CALLS).map(|number| json!({"call_sid": format!("{name}-{number}")}));
    let sids: Vec<_> = sids.collect();
    for sid in &sids {
        assert_eq!(connection.post("/api/v1/allocate", sid).status, 200);
    }
    sids
}

/// Releases these calls.
fn release(address: SocketAddr, sids: &[serde_json::Value]) {
    let mut connection = Connection::open(address);
    for sid in sids {
        assert_eq!(connection.post("/api/v1/release", sid).status, 200);
    }
}

/// One router of a store reads the events of all calls, for its capacity decisions. That is work
/// in the background, not of a request.
fn leave_capacity_to_another_router(server: &RedisServer) {
    let mut redis = server.connection();
    let (seconds, _): (u64, u64) = redis::cmd("TIME").query(&mut redis).unwrap();
    let until = ((seconds + 50) * 1_000).to_string();
    let fields = ["holder", "another", "epoch", "4000000000", "until", &until];
    redis::cmd("HSET").arg("voice:capacity").arg(&fields).exec(&mut redis).unwrap();
}

/// Heap allocations per request of this thread, which runs the router, while another thread sends
/// requests.
fn count_allocations<T: Send + 'static>(
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
fn heap_allocations_per_request_stay_within_bounds() {
    let server = RedisServer::start(&[]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let url = server.url();
    // Measured: 61 and 56 (1 and 3 of them for events), 80 and 68; an allocation has two for the
    // path and the token of its stream URL. Background tasks of the router add a little.
    for (store, limits) in [(None, [64.0, 59.0]), (Some(url.as_str()), [83.0, 70.0])] {
        let tiers = format!(r#"{{"gold": {}}}"#, 2 * CALLS);
        let mut arguments = vec!["smart-router", "--http-port", "0", "--metrics-port", "0"];
        arguments.extend(["--tier-config", &tiers]);
        arguments.extend(store.iter().flat_map(|url| ["--redis-url", url]));
        let settings = Arguments::try_parse_from(arguments).unwrap().settings;
        let running =
            runtime.block_on(smart_router::start(Config::new(settings).unwrap())).unwrap();
        let address = running.api;
        if store.is_some() {
            leave_capacity_to_another_router(&server);
        }
        let (_, warm) = count_allocations(&runtime, move || allocate(address, "warm"));
        count_allocations(&runtime, move || release(address, &warm));
        let (per_allocate, sids) = count_allocations(&runtime, move || allocate(address, "call"));
        let (per_release, ()) = count_allocations(&runtime, move || release(address, &sids));
        println!("{store:?}: allocate {per_allocate:.1}, release {per_release:.1}");
        assert!(
            per_allocate <= limits[0] && per_release <= limits[1],
            "{per_allocate} and {per_release}, at most {limits:?}"
        );
        runtime.block_on(running.stop());
    }
}
