use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::json;

use testkit::{Connection, Router, eventually};

#[test]
fn metrics_count_operations_without_call_or_pod_labels() {
    let router = Router::start(&[]);
    router.allocate("CA-secret-1");
    router.allocate("CA-secret-1");
    router.allocate("CA-secret-2");
    router.release("CA-secret-1");
    router.release("CA-secret-1");
    router.post("/api/v1/drain", json!({"pod_name": "voice-agent-2"}));
    let mut connection = Connection::open(router.metrics);
    let mut text = String::new();
    // Gauges are refreshed once a second.
    eventually(Duration::from_secs(5), "the gauges are refreshed", || {
        text = connection.get("/metrics").text();
        text.contains("smart_router_pool_draining_pods{tier=\"basic\"} 1\n")
    });
    for line in [
        r#"smart_router_allocations_total{source_pool="pool:gold",result="success"} 1"#,
        r#"smart_router_allocations_total{source_pool="pool:gold",result="existing"} 1"#,
        r#"smart_router_allocations_total{source_pool="pool:standard",result="success"} 1"#,
        r#"smart_router_releases_total{source_pool="pool:gold",result="success"} 1"#,
        r#"smart_router_releases_total{source_pool="",result="not_found"} 1"#,
        "smart_router_active_calls 1",
        r#"smart_router_pool_available_pods{tier="gold"} 1"#,
        r#"smart_router_pool_available_pods{tier="standard"} 0"#,
        r#"smart_router_pool_assigned_pods{tier="standard"} 1"#,
        r#"smart_router_pool_available_pods{tier="basic"} 0"#,
        r#"smart_router_pool_target_pods{tier="gold"} 1"#,
        r#"smart_router_pool_draining_pods{tier="basic"} 1"#,
        r#"smart_router_pool_free_slots{tier="basic"} 0"#,
        r#"smart_router_pool_active_calls{tier="standard"} 1"#,
        r#"smart_router_pool_not_ready_pods{tier="gold"} 0"#,
        r#"smart_router_denied_total{reason="forged"} 0"#,
        // Alerts use increase(), which needs the series to exist before the first event.
        r#"smart_router_allocations_total{source_pool="",result="storage_error"} 0"#,
        r#"smart_router_releases_total{source_pool="",result="error"} 0"#,
        r#"smart_router_refusals_total{tier="",reason="unknown"} 0"#,
        "smart_router_drains_unfinished_total 0",
        "smart_router_stale_pods_drained_total 0",
        "smart_router_kept_releases 0",
        "smart_router_leader_status 1",
        "smart_router_drains_total 1",
        "smart_router_panics_recovered_total 0",
        "smart_router_zombies_recovered_total 0",
        "smart_router_store_circuit_open 0",
        r#"http_requests_total{method="POST",endpoint="/api/v1/allocate",status="200"} 3"#,
        r#"http_request_duration_seconds_count{method="POST",endpoint="/api/v1/release",status="404"} 1"#,
        r#"smart_router_store_duration_seconds_count{operation="allocate"} 3"#,
        r#"smart_router_call_duration_seconds_count{source_pool="pool:gold"} 1"#,
    ] {
        assert!(text.lines().any(|other| other == line), "{line} is not in\n{text}");
    }
    let value = |name: &str| -> f64 {
        let line = text.lines().find(|line| line.starts_with(&format!("{name} ")));
        line.expect(name).rsplit(' ').next().unwrap().parse().unwrap()
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    for time in ["process_start_time_seconds", "smart_router_last_comparison_timestamp_seconds"] {
        assert!((now - 60.0..=now).contains(&value(time)), "{time}");
    }
    assert!(value("process_cpu_seconds_total") < 10.0);
    assert!((1e6..1e9).contains(&value("process_resident_memory_bytes")));
    assert!(value("process_open_fds") > 5.0);
    let version = concat!("build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1");
    assert!(text.contains(version), "{text}");
    assert!(!text.contains("CA-secret") && !text.contains("voice-agent-"), "{text}");
    assert!(text.ends_with("# EOF\n"));
}
