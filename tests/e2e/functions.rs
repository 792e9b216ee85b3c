//! The function library in Redis: loaded when it is missing, separate for each version.

use std::{
    collections::{BTreeSet, HashMap},
    fs::File,
    path::Path,
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use fleet::{
    Allocate, Release,
    tiers::{DocumentSource, Tiers},
};
use store::{Functions, Redis, RedisConfig, Store};

use testkit::{
    Router, eventually, program,
    redis::{RedisServer, WRITER, ready_pod, store_config},
    scratch,
};

/// An available store with these functions.
async fn store(server: &RedisServer, functions: Functions) -> Arc<Redis> {
    let tiers = Tiers::parse(r#"{"gold": 2}"#, DocumentSource::Settings).unwrap().0;
    let config = RedisConfig { functions, ..store_config(server, tiers) };
    let store = Redis::start(config).unwrap();
    store.wait_until_available(Duration::from_secs(5)).await.unwrap();
    store
}

fn libraries(server: &RedisServer) -> Vec<String> {
    let mut list = redis::cmd("FUNCTION");
    list.arg("LIST").arg("LIBRARYNAME").arg("smart_router_*");
    let listed: Vec<HashMap<String, redis::Value>> = list.query(&mut server.connection()).unwrap();
    let name = |library: &HashMap<String, redis::Value>| {
        redis::from_redis_value_ref(&library["library_name"]).unwrap()
    };
    listed.iter().map(name).collect()
}

async fn a_call(store: &Redis, name: &str) {
    let call = name.parse().unwrap();
    store.allocate(&Allocate::new(call, None, 900_000)).await.unwrap().unwrap();
    store.release(&Release::new(name.parse().unwrap(), None)).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn routers_of_two_versions_share_a_redis() {
    let server = RedisServer::start(&[]);
    let old = store(&server, Functions::default()).await;
    let facts = ready_pod();
    old.observe_pod(&"a".parse().unwrap(), &facts, WRITER).await.unwrap().unwrap();
    a_call(&old, "CA1").await;
    assert_eq!(libraries(&server).len(), 1);

    // The newer store deletes the older library; the older store loads it again.
    let new = store(&server, Functions::edited(|code| format!("{code}\n-- newer"))).await;
    for number in 0..50 {
        a_call(&old, &format!("old-{number}")).await;
        a_call(&new, &format!("new-{number}")).await;
    }
    assert_eq!(libraries(&server).len(), 2);

    // Libraries of versions that no longer run are deleted.
    old.close().await;
    new.close().await;
    let newest = Functions::edited(|code| format!("{code}\n-- newest"));
    let name = newest.schema_2.library.name.clone();
    let last = store(&server, newest).await;
    let has_last_only = || libraries(&server) == [name.clone()];
    eventually(Duration::from_secs(5), "older libraries are deleted", has_last_only);
    a_call(&last, "CA2").await;
}

#[test]
fn a_missing_library_is_loaded_again_at_once() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router = Router::start(&[("REDIS_URL", &url), ("TIER_CONFIG", r#"{"gold": 2}"#)]);
    for number in 0..20 {
        redis::cmd("FUNCTION").arg("FLUSH").exec(&mut server.connection()).unwrap();
        let call = serde_json::json!({"call_sid": format!("CA{number}")});
        assert_eq!(router.connect().post("/api/v1/allocate", &call).status, 200);
        redis::cmd("FUNCTION").arg("FLUSH").exec(&mut server.connection()).unwrap();
        assert_eq!(router.connect().post("/api/v1/release", &call).status, 200);
    }
}

/// Starts a router on an unusable Redis and waits until its log contains all of the texts.
fn logs_error(url: &str, expected: &[&str]) {
    let mut command = program(&[
        ("REDIS_URL", url),
        ("HTTP_PORT", "0"),
        ("METRICS_PORT", "0"),
        ("TIER_CONFIG", r#"{"gold": 2}"#),
    ]);
    let log = scratch().join("log");
    let file = File::create(&log).unwrap();
    let mut child = command.stdout(Stdio::null()).stderr(file).spawn().unwrap();
    eventually(Duration::from_secs(3), &format!("the log contains {expected:?}"), || {
        let text = std::fs::read_to_string(&log).unwrap();
        expected.iter().all(|part| text.contains(part))
    });
    // It may have exited already.
    let _ = child.kill();
    child.wait().unwrap();
}

#[test]
fn a_user_without_function_load_gets_an_error_that_names_it() {
    let server = RedisServer::start(&[]);
    redis::cmd("ACL")
        .arg(&["SETUSER", "router", "on", ">secret", "~voice:*", "&voice:*", "+@all", "-function"])
        .exec(&mut server.connection())
        .unwrap();
    let url = server.url().replace("redis://", "redis://router:secret@");
    logs_error(&url, &["Redis cannot be used", "function|load"]);
}

#[test]
fn the_documented_permissions_are_enough() {
    let server = RedisServer::start(&[]);
    let docs = std::fs::read_to_string(Path::new(testkit::ROOT).join("docs/redis.md")).unwrap();
    let line = docs.lines().find(|line| line.starts_with("ACL SETUSER router")).unwrap();
    let words: Vec<_> = line.split(' ').skip(1).collect();
    redis::cmd("ACL").arg(words).exec(&mut server.connection()).unwrap();
    let url = server.url().replace("redis://", "redis://router:secret@");
    let router = Router::start(&[("REDIS_URL", &url), ("TIER_CONFIG", r#"{"gold": 1}"#)]);
    router.allocate("CA1");
    assert_eq!(router.get("/api/v1/events").0, 200);
    assert_eq!(router.release("CA1").0, 200);
}

#[test]
fn the_error_names_a_denied_command_of_the_functions() {
    let server = RedisServer::start(&[]);
    redis::cmd("ACL")
        .arg(&["SETUSER", "router", "on", ">secret", "~voice:*", "&voice:*", "+@all", "-zpopmin"])
        .exec(&mut server.connection())
        .unwrap();
    let url = server.url().replace("redis://", "redis://router:secret@");
    logs_error(&url, &["Redis cannot be used", "this user may not run ZPOPMIN"]);
}

/// Finds commands as words of capitals between quotes that Redis knows.
#[test]
fn permissions_are_checked_for_every_command_of_the_functions() {
    let server = RedisServer::start(&[]);
    let open_store =
        std::fs::read_to_string(Path::new(testkit::ROOT).join("crates/store/lua/open_store.lua"))
            .unwrap();
    let list = open_store.split_once("COMMANDS = ").unwrap().1.split_once("\n\n").unwrap().0;
    let checked: BTreeSet<String> = list
        .split(|it: char| !it.is_ascii_uppercase())
        .filter(|it| !it.is_empty())
        .map(str::to_owned)
        .collect();
    let mut used = BTreeSet::new();
    for directory in ["crates/store/lua", "crates/store/lua/common"] {
        let directory = Path::new(testkit::ROOT).join(directory);
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() && !path.ends_with("open_store.lua") {
                let text = std::fs::read_to_string(path).unwrap();
                used.extend(text.split('\'').map(str::to_owned));
            }
        }
    }
    used.extend(["GET", "HSET", "SET"].map(str::to_owned));
    used.retain(|it| !it.is_empty() && it.bytes().all(|byte| byte.is_ascii_uppercase()));
    let known: Vec<redis::Value> = redis::cmd("COMMAND")
        .arg("INFO")
        .arg(used.iter().collect::<Vec<_>>())
        .query(&mut server.connection())
        .unwrap();
    let known = used.iter().zip(known).filter(|(_, info)| *info != redis::Value::Nil);
    let known: BTreeSet<String> = known.map(|(name, _)| name.clone()).collect();
    let expected = checked.union(&BTreeSet::from(["PUBLISH".to_owned()])).cloned().collect();
    assert_eq!(known, expected);
}

#[test]
fn a_redis_without_functions_is_refused_with_the_reason() {
    let server = RedisServer::start(&["--rename-command", "FCALL", ""]);
    logs_error(&server.url(), &["Redis 7 or Valkey is needed"]);
}

#[test]
fn releases_are_deferred_while_a_full_redis_cannot_load_the_library() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router = Router::start(&[("REDIS_URL", &url), ("TIER_CONFIG", r#"{"gold": 1}"#)]);
    let call = serde_json::json!({"call_sid": "CA1"});
    assert_eq!(router.connect().post("/api/v1/allocate", &call).status, 200);
    let limit = |bytes: &str| {
        let mut config = redis::cmd("CONFIG");
        config.arg("SET").arg("maxmemory").arg(bytes).exec(&mut server.connection()).unwrap();
    };
    limit("1");
    redis::cmd("FUNCTION").arg("FLUSH").exec(&mut server.connection()).unwrap();
    assert_eq!(router.connect().post("/api/v1/release", &call).status, 503);
    limit("0");
    let other = serde_json::json!({"call_sid": "CA2"});
    eventually(Duration::from_secs(5), "the pod is free", || {
        router.connect().post("/api/v1/allocate", &other).status == 200
    });
}

#[test]
fn only_own_libraries_that_can_be_loaded_again_are_deleted() {
    let server = RedisServer::start(&[]);
    let load = |name: &str, function: &str| {
        let code = format!(
            "#!lua name={name}\nredis.register_function('{function}', function() return 1 end)"
        );
        redis::cmd("FUNCTION").arg("LOAD").arg(code).exec(&mut server.connection()).unwrap();
    };
    load("smart_router_of_another_program", "foreign");
    load("smart_router_deadbeef0000", "older");
    let settings = [("REDIS_URL", server.url()), ("TIER_CONFIG", r#"{"gold": 1}"#.into())];
    let settings = settings.each_ref().map(|(name, value)| (*name, value.as_str()));
    let router = Router::start(&settings);
    eventually(Duration::from_secs(5), "the older library is deleted", || {
        !libraries(&server).contains(&"smart_router_deadbeef0000".to_owned())
    });
    assert!(libraries(&server).contains(&"smart_router_of_another_program".to_owned()));
    drop(router);

    load("smart_router_deadbeef0000", "older");
    redis::cmd("CONFIG").arg(&["SET", "maxmemory", "1"]).exec(&mut server.connection()).unwrap();
    // The own library is loaded: this router starts, and deletes nothing.
    let _router = Router::start(&settings);
    // No event shows that a deletion does not happen.
    std::thread::sleep(Duration::from_millis(300));
    assert!(libraries(&server).contains(&"smart_router_deadbeef0000".to_owned()));
    redis::cmd("CONFIG").arg(&["SET", "maxmemory", "0"]).exec(&mut server.connection()).unwrap();
}

/// A replica reads a changed tier document first, and writes the table later.
#[tokio::test(flavor = "multi_thread")]
async fn a_replica_does_not_replace_a_newer_tier_document() {
    let server = RedisServer::start(&[]);
    let functions = Functions::default();
    let apply = functions.schema_2.apply_tiers.function.clone();
    let _store = store(&server, functions).await;
    let mut redis = server.connection();
    let document: String = redis::cmd("GET").arg("voice:tier:config").query(&mut redis).unwrap();
    let table = |redis: &mut redis::Connection| -> Option<String> {
        redis::cmd("HGET").arg("voice:tiers").arg("tin").query(redis).unwrap()
    };
    for (read, word, entry) in [
        ("@an older document".to_owned(), "changed", None),
        ("@".to_owned(), "changed", None),
        (format!("@{document}"), "applied", Some("exclusive 1 spread 1")),
    ] {
        let answer: Vec<redis::Value> = redis::cmd("FCALL")
            .arg(&apply)
            .arg(1)
            .arg("voice:")
            .arg(&[0])
            .arg(&["", "", "tin=exclusive:1:spread", "", &read, "tin", "exclusive 1 spread 1"])
            .query(&mut redis)
            .unwrap();
        assert_eq!(redis::from_redis_value_ref::<String>(&answer[0]).unwrap(), word, "{read}");
        assert_eq!(table(&mut redis).as_deref(), entry);
    }
}
