//! Bad input is refused with a reason, and changes nothing.

use serde_json::json;

use super::*;
use testkit::{Router, program};

#[test]
fn bad_prescale_orders_are_refused_with_the_field() {
    let router = Router::start(&[]);
    let good = json!({"pool": "gold", "pods": 4, "for": "1h"});
    let bad = [
        (json!({"pool": ""}), "pool", 400),
        (json!({"pool": null}), "pool", 400),
        (json!({"pool": "a b"}), "pool", 400),
        (json!({"pool": "merchant:../x"}), "pool", 400),
        (json!({"pods": null}), "pods", 400),
        (json!({"pods": 0}), "pods", 400),
        (json!({"pods": -4}), "pods", 400),
        (json!({"pods": 1.5}), "pods", 400),
        (json!({"pods": "4"}), "pods", 400),
        (json!({"pods": 1e9}), "pods", 400),
        (json!({"for": null}), "until", 400),
        (json!({"for": "1 hour"}), "for", 400),
        (json!({"for": "0s"}), "for", 400),
        (json!({"until": 5}), "until", 400),
        (json!({"for": null, "until": 5}), "until", 400),
        (json!({"for": null, "until": 1e300}), "until", 400),
        (json!({"for": null, "until": "soon"}), "until", 400),
        (json!({"for": null, "until": "9999-01-01T00:00:00Z"}), "until", 400),
        (json!({"pool": "nowhere"}), "", 404),
        (json!({"pool": "merchant:gold"}), "", 404),
    ];
    for (change, field, expected) in bad {
        let mut body = good.clone();
        for (name, value) in change.as_object().unwrap() {
            body[name] = value.clone();
        }
        let (status, answer) = router.post("/api/v1/prescale", body.clone());
        assert_eq!(status, expected, "{body}: {answer}");
        assert!(answer["error"].as_str().is_some_and(|error| !error.is_empty()), "{answer}");
        let named = answer["details"]["field"].as_str().unwrap_or_default();
        // Names are reported by the field of their own type.
        assert!(named == field || field == "pool", "{body}: {answer}");
    }
    for body in [&b"[]"[..], b"{", b"", b"null", b"\xff"] {
        let mut connection = router.connect();
        let (status, _) = connection.send("POST", "/api/v1/prescale", &[], body).json();
        assert_eq!(status, 400);
    }
    for id in ["x", "ABCDEF01", "0123456", "012345678", "..%2f", "zzzzzzzz"] {
        let path = format!("/api/v1/prescale/{id}");
        let (status, answer) = router.connect().send("DELETE", &path, &[], b"").json();
        assert_eq!(status, 400, "{id}: {answer}");
    }
    assert_eq!(router.get("/api/v1/prescale").1["orders"], json!([]));
}

#[test]
fn capacity_without_events_says_what_is_missing() {
    let router = Router::start(&[("EVENTS", "off")]);
    let (status, answer) = router.get("/api/v1/capacity");
    assert_eq!(status, 503);
    assert!(answer["error"].as_str().unwrap().contains("EVENTS is off"), "{answer}");
    assert!(!router.connect().get("/metrics").text().contains("desired_pods"));
}

#[test]
fn bad_settings_of_the_policy_are_named() {
    for (name, value) in [
        ("CAPACITY_TARGET", "101%"),
        ("CAPACITY_TARGET", "49"),
        ("CAPACITY_TARGET", "much"),
        ("CAPACITY_TIME_ZONE", "Mars/Olympus"),
        ("TIER_CONFIG", r#"{"gold": {"min": 2, "max": 1}}"#),
    ] {
        let output = program(&[(name, value)]).arg("check-config").output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains(name), "{name}={value}: {error}");
    }
    let settings = [("CAPACITY_TARGET", "99.5"), ("CAPACITY_TIME_ZONE", "Europe/Berlin")];
    let output = program(&settings).arg("check-config").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("CAPACITY_TARGET=99.5%\n"), "{text}");
    assert!(text.contains("CAPACITY_TIME_ZONE=Europe/Berlin\n"), "{text}");
}

#[test]
fn only_administrators_order_pods() {
    let router = Router::start(&[("API_TOKENS", "viewer:see-only-1234567,admin:admin-12345678")]);
    let mut viewer = router.connect();
    viewer.token = Some("see-only-1234567".into());
    let body = json!({"pool": "gold", "pods": 4, "for": "1h"});
    assert_eq!(viewer.post("/api/v1/prescale", &body).status, 403);
    assert_eq!(viewer.get("/api/v1/prescale").status, 200);
    wait_for(&router, "gold", "decisions are taken", |_| true);
    assert_eq!(viewer.get("/api/v1/capacity").status, 200);
    assert_eq!(viewer.send("DELETE", "/api/v1/prescale/00000000", &[], b"").status, 403);
    viewer.token = None;
    assert_eq!(viewer.get("/api/v1/capacity").status, 401);
}
