//! Faults during the migration of the layout: a wiped store, a newer schema, a missing permission, a
//! killed router.

use std::time::{Duration, Instant};

use redis::{Commands, Connection};
use store::Store;

use crate::migration::{
    QUIET_PERIOD, Replica, SECOND, add_pods, field_names, release, release_migration, request,
    schema, schema_1, until, until_migrated,
};
use testkit::{Router, eventually, proxy::FaultProxy, redis::RedisServer};

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_wiped_before_the_migration_recovers() {
    let (server, mut redis) = schema_1();
    let replica = Replica::start(&server, server.url()).await;
    redis::cmd("FLUSHALL").exec(&mut redis).unwrap();
    until("the store is set up", || redis.exists("voice:schema").unwrap()).await;
    until("the store is available", || replica.store.outage().is_none()).await;
    add_pods(&replica.store, 1).await;
    replica.store.allocate(&request("CA1")).await.unwrap().unwrap();
    until_migrated(&mut redis).await;
    replica.store.release(&release("CA1", 1)).await.unwrap().unwrap();
    replica.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_schema_is_refused_while_the_router_runs() {
    let server = RedisServer::start(&[]);
    let replica = Replica::start(&server, server.url()).await;
    let _: () = server.connection().set("voice:schema", "3").unwrap();
    let is_refused =
        || replica.store.outage().is_some_and(|reason| reason.contains("use a newer release"));
    until("the schema is refused", is_refused).await;
    replica.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_permission_for_function_list_the_schema_stays_1() {
    let (server, mut redis) = schema_1();
    release_migration(&mut redis);
    let acl = |rule: &str, redis: &mut Connection| {
        let user = ["SETUSER", "router", "on", ">secret", "~voice:*", "&voice:*", "+@all", rule];
        redis::cmd("ACL").arg(&user).exec(redis).unwrap();
    };
    acl("-function|list", &mut redis);
    let url = server.url().replace("redis://", "redis://router:secret@");
    let replica = Replica::start(&server, url).await;
    add_pods(&replica.store, 1).await;
    let until_quiet = Instant::now() + 4 * QUIET_PERIOD;
    while Instant::now() < until_quiet {
        replica.store.allocate(&request("CA1")).await.unwrap().unwrap();
        replica.store.release(&release("CA1", 1)).await.unwrap().unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!((schema(&mut redis).as_str(), replica.store.outage()), ("1", None));
    acl("+function|list", &mut redis);
    until_migrated(&mut redis).await;
    replica.stop().await;
}

/// Waits for the quiet period of the program, so it takes half a minute.
#[test]
fn a_router_finishes_the_migration_of_a_router_that_was_killed() {
    const CALLS: usize = 2_500;
    let (server, mut redis) = schema_1();
    let proxy = FaultProxy::to(server.port);
    let url = format!("redis://{}", proxy.address);
    let tiers = r#"{"basic": {"type": "shared", "target": 30, "max_concurrent": 100}}"#;
    let settings = [("REDIS_URL", url.as_str()), ("TIER_CONFIG", tiers)];
    let (mut router, log) =
        Router::start_logged(&[&settings[..], &[("LOG_LEVEL", "info")]].concat());
    let mut connection = router.connect();
    for call in 0..CALLS {
        let body = serde_json::json!({"call_sid": format!("CA{call}")});
        assert_eq!(connection.post("/api/v1/allocate", &body).status, 200);
    }
    release_migration(&mut redis);
    eventually(40 * SECOND, "the schema changes", || schema(&mut redis) == "2");
    proxy.set_latency(Duration::from_millis(40));
    let is_half_done = |redis: &mut Connection| {
        let names = field_names(redis);
        names.contains("request_ids") && names.contains("attempt")
    };
    eventually(5 * SECOND, "some records are renamed", || is_half_done(&mut redis));
    router.child.kill().unwrap();
    router.child.wait().unwrap();
    std::mem::forget(router);
    assert!(log.text().contains("migrated the layout in Redis"), "{}", log.text());
    assert!(is_half_done(&mut redis), "the router was killed half-way");
    assert_eq!(redis.get::<_, String>("voice:migration").unwrap(), "renaming");
    proxy.heal();
    let router = Router::start(&settings);
    eventually(5 * SECOND, "all records are renamed", || {
        redis.get::<_, String>("voice:migration").unwrap() == "done"
    });
    let names = field_names(&mut redis);
    assert!(names.contains("request_ids") && !names.contains("attempt"), "{names:?}");
    assert_eq!(router.status()["active_calls"], CALLS);
}
