//! The cost of operations in Redis commands. A change that adds commands to the path of a call has
//! to change this test.

use std::{sync::Arc, time::Duration};

use fleet::{
    Allocate, Attach, Confirm, Detach, EndCause, Hold, Release, Renew, SignedRequest,
    names::{CallSid, GatewayId, StreamId},
    tiers::{DocumentSource, Tiers},
};
use store::{Redis, RedisConfig, Store, Ttls};

use testkit::redis::{RedisServer, WRITER, ready_pod, store_config};

struct CountedStore {
    server: RedisServer,
    store: Arc<Redis>,
}

impl CountedStore {
    async fn new() -> Self {
        let server = RedisServer::start(&[]);
        let tiers = r#"{"tiers": {"gold": {"target": 2}, "basic": {"type": "shared", "target": 2, "max_concurrent": 3}}}"#;
        let tiers = Tiers::parse(tiers, DocumentSource::Settings).unwrap().0;
        let config = store_config(&server, tiers);
        // A short lease, so that the re-registration window, which costs more, is soon over.
        let config = RedisConfig { ttls: Ttls { lease: 1, ..config.ttls }, ..config };
        let store = Redis::start(config).unwrap();
        store.wait_until_available(Duration::from_secs(5)).await.unwrap();
        let counted = Self { server, store };
        for name in ["a", "b", "c", "d"] {
            let facts = ready_pod();
            counted
                .store
                .observe_pod(&name.parse().unwrap(), &facts, WRITER)
                .await
                .unwrap()
                .unwrap();
        }
        counted
    }

    /// Runs an operation. Returns the numbers of commands and of functions.
    async fn commands<T>(&self, operation: impl Future<Output = T>) -> (usize, usize, T) {
        let mut connection = self.server.connection();
        redis::cmd("CONFIG").arg("RESETSTAT").exec(&mut connection).unwrap();
        let outcome = operation.await;
        let info: String = redis::cmd("INFO").arg("commandstats").query(&mut connection).unwrap();
        let (mut commands, mut functions) = (0, 0);
        for line in info.lines().filter_map(|line| line.strip_prefix("cmdstat_")) {
            let (name, stats) = line.split_once(':').unwrap();
            let calls: usize = stats.split([',', '=']).nth(1).unwrap().parse().unwrap();
            match name {
                "fcall" => functions += calls,
                name if name.starts_with("config") || name == "info" => {}
                _ => commands += calls,
            }
        }
        (commands, functions, outcome)
    }
}

fn call(name: &str) -> CallSid {
    name.parse().unwrap()
}

#[tokio::test]
async fn the_path_of_a_call_has_a_fixed_cost() {
    let counted = CountedStore::new().await;
    let store = &counted.store;
    let plain = |name: &str| Allocate::new(call(name), None, 900_000);
    // The library is loaded from here on, and the tier table is in force.
    store.allocate(&plain("first")).await.unwrap().unwrap();
    store.release(&Release::new(call("first"), None)).await.unwrap().unwrap();

    let request = plain("CA1");
    let (commands, functions, given) = counted.commands(store.allocate(&request)).await;
    assert_eq!(given.unwrap().unwrap().pool.to_string(), "pool:gold");
    assert_eq!((commands, functions), (13, 1), "allocate, exclusive");

    let (commands, functions, _) = counted.commands(store.allocate(&request)).await;
    assert_eq!((commands, functions), (9, 1), "idempotent repeat");

    store.allocate(&plain("CA2")).await.unwrap().unwrap();
    let request = plain("CA3");
    let (commands, functions, given) = counted.commands(store.allocate(&request)).await;
    assert_eq!(given.unwrap().unwrap().pool.to_string(), "pool:basic");
    assert_eq!(
        (commands, functions),
        (18, 1),
        "allocate, fall-through to shared: one command looks for pods at risk"
    );

    let renew = Renew { calls: vec![call("CA1")], pod: None, lease_ttl: 900_000 };
    let (commands, functions, _) = counted.commands(store.renew(&renew)).await;
    assert_eq!((commands, functions), (17, 1), "first renewal");
    let (commands, functions, _) = counted.commands(store.renew(&renew)).await;
    assert_eq!((commands, functions), (16, 1), "renew");

    let release = Release::new(call("CA1"), None);
    let (commands, functions, freed) = counted.commands(store.release(&release)).await;
    assert!(freed.unwrap().is_ok());
    assert_eq!((commands, functions), (11, 1), "release");

    // One command more if calls may reconnect, for the call history.
    let request = Allocate { may_return: true, ..plain("CA4") };
    let (commands, ..) = counted.commands(store.allocate(&request)).await;
    assert_eq!(commands, 13, "allocate, with retry on disconnect");
    let release = Release::new(call("CA4"), None);
    let (commands, ..) = counted.commands(store.release(&release)).await;
    assert_eq!(commands, 12, "release, with retry on disconnect");

    // No command more if calls may wait and none does.
    let hold =
        Hold { time: 60_000, poll_timeout: 60_000, max_waiting: 10, max_waiting_per_merchant: 10 };
    let request = Allocate { hold: Some(hold), ..plain("CA5") };
    let (commands, ..) = counted.commands(store.allocate(&request)).await;
    assert_eq!(commands, 13, "allocate, with a hold time");
    let release = Release::new(call("CA5"), None);
    let (commands, ..) = counted.commands(store.release(&release)).await;
    assert_eq!(commands, 11, "release, no call waits");

    // Two more for a signed request, which is looked up and recorded.
    let fingerprint = "0123456789abcdef".parse().unwrap();
    let signed = Some(SignedRequest { fingerprint, window: 60_000 });
    let request = Allocate { signed, ..plain("CA7") };
    let (commands, functions, _) = counted.commands(store.allocate(&request)).await;
    assert_eq!((commands, functions), (16, 1), "allocate, signed");
    let (commands, ..) = counted.commands(store.allocate(&request)).await;
    assert_eq!(commands, 6, "repeat of a signed request");
    let release = Release::new(call("CA7"), None);
    let (commands, ..) = counted.commands(store.release(&release)).await;
    assert_eq!(commands, 11, "release of a call with a signed request");
    let (commands, _, given) = counted.commands(store.allocate(&request)).await;
    assert_eq!((commands, given.unwrap().is_err()), (4, true), "a replay");

    let request = Allocate { provisional: true, ..plain("CA6") };
    let (commands, _, given) = counted.commands(store.allocate(&request)).await;
    assert_eq!(commands, 13, "allocate, provisional");
    let (pod, pod_attempt) = (given.unwrap().unwrap().pod, None);
    let confirm = Confirm { call: call("CA6"), pod, pod_attempt, lease_ttl: 900_000 };
    let (commands, ..) = counted.commands(store.confirm(&confirm)).await;
    assert_eq!(commands, 17, "confirm");
    store.close().await;
}

#[tokio::test]
async fn the_path_of_a_stream_has_a_fixed_cost() {
    let counted = CountedStore::new().await;
    let store = &counted.store;
    let request = Allocate { provisional: true, ..Allocate::new(call("CA1"), None, 900_000) };
    let request = Allocate { expects_stream: true, may_return: true, ..request };
    // The library is loaded from here on.
    store.allocate(&request).await.unwrap().unwrap();
    let gateway: GatewayId = "g1".parse().unwrap();
    let stream: StreamId = "0000000000000001".parse().unwrap();
    let attach = Attach {
        call: call("CA1"),
        pod_attempt: 1,
        gateway: gateway.clone(),
        gateway_lease: 30_000,
        stream: stream.clone(),
        lease_ttl: 900_000,
        connected: None,
    };
    let (commands, functions, attached) = counted.commands(store.attach(&attach)).await;
    assert!(attached.unwrap().is_ok());
    assert_eq!((commands, functions), (20, 1), "attach");
    let (commands, functions, _) = counted.commands(store.heartbeat(&gateway, 30_000, &[])).await;
    assert_eq!((commands, functions), (6, 1), "heartbeat");
    let release = Release::new(call("CA1"), None);
    let (commands, functions, released) = counted.commands(store.release(&release)).await;
    assert!(released.unwrap().unwrap().is_ending);
    assert_eq!((commands, functions), (10, 1), "release of an attached call");
    let detach = Detach {
        call: call("CA1"),
        stream,
        cause: EndCause::Provider,
        failure: Default::default(),
    };
    let (commands, functions, detached) = counted.commands(store.detach(&detach)).await;
    assert!(detached.unwrap().is_ok());
    assert_eq!((commands, functions), (13, 1), "detach");
    store.close().await;
}
