//! HTTPS, with curl and our own commands as clients.

use std::{
    fs,
    process::{Child, Command, Output, Stdio},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use testkit::{Connection, Log, certificates::Authority, eventually, free_port, program, scratch};

/// A router that speaks TLS, on ports of its own.
struct Router {
    child: Child,
    url: String,
    metrics: u16,
    log: Log,
}

impl Router {
    fn start(settings: &[(&str, &str)]) -> Self {
        let (api, metrics) = (free_port(), free_port());
        let mut command = program(settings);
        command.env("HTTP_PORT", api.to_string()).env("METRICS_PORT", metrics.to_string());
        let log = Log::create();
        command.env("LOG_LEVEL", "warn").stdout(Stdio::null()).stderr(log.sink());
        let (child, url) = (command.spawn().unwrap(), format!("https://localhost:{api}"));
        let router = Self { child, url, metrics, log };
        eventually(Duration::from_secs(10), "the router is ready", || {
            let connection = Connection::try_open(([127, 0, 0, 1], metrics).into());
            connection
                .and_then(|mut connection| connection.try_get("/ready"))
                .is_some_and(|answer| answer.status == 200)
        });
        router
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Asks as curl does; how it exits, and what it prints.
fn curl(args: &[&str]) -> (i32, String) {
    let output = Command::new("curl").args(["-s", "-m", "30"]).args(args).output().unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
}

fn command(settings: &[(&str, &str)], args: &[&str]) -> Output {
    program(settings).args(args).output().unwrap()
}

#[test]
fn calls_go_over_tls_from_the_first_question_to_the_last_frame() {
    let authority = Authority::create();
    let (ca, own) = (authority.file(), authority.sign("router"));
    let router = Router::start(&[("TLS_CERT_FILE", &own.file), ("TLS_KEY_FILE", &own.key)]);
    let url = router.url.as_str();
    let (code, answer) = curl(&["--cacert", &ca, &format!("{url}/ready")]);
    assert_eq!(code, 0, "{answer}");
    assert_eq!(curl(&[&format!("{url}/ready")]).0, 60, "nobody knows the authority");
    let plain = url.replace("https", "http");
    let (_, answer) = curl(&["-i", &format!("{plain}/ready")]);
    assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("https://"), "{answer}");
    let (_, metrics) = curl(&[&format!("http://localhost:{}/metrics", router.metrics)]);
    assert!(metrics.contains("smart_router_active_calls"), "metrics need no TLS");

    let told = command(
        &[("SMART_ROUTER_URL", url), ("SMART_ROUTER_CA_FILE", &ca)],
        &["call", "--talk", "100ms"],
    );
    let text = String::from_utf8(told.stdout).unwrap();
    assert!(told.status.success() && text.contains("stream to wss://localhost"), "{text}");
    let told = command(&[("SMART_ROUTER_URL", url)], &["status"]);
    let text = String::from_utf8(told.stderr).unwrap();
    assert_eq!(told.status.code(), Some(4), "{text}");
    assert!(text.contains("certificate"), "{text}");
}

#[test]
fn who_must_show_a_certificate_and_has_none_stays_outside() {
    let (authority, strange) = (Authority::create(), Authority::create());
    let (ca, own, client) = (authority.file(), authority.sign("router"), authority.sign("client"));
    let stranger = strange.sign("client");
    let admin = free_port();
    let bind = format!("127.0.0.1:{admin}");
    let tls = [
        ("TLS_CERT_FILE", own.file.as_str()),
        ("TLS_KEY_FILE", &own.key),
        ("TLS_CLIENT_CA_FILE", &ca),
    ];
    let with = |url: &str, shown: &[&str]| {
        curl(&[&["--cacert", &ca, "-o", "/dev/null", "-w", "%{http_code}"], shown, &[url]].concat())
    };
    let mine = ["--cert", &client.file, "--key", &client.key];
    let theirs = ["--cert", &stranger.file, "--key", &stranger.key];

    let router = Router::start(&tls);
    let status = format!("{}/api/v1/status", router.url);
    assert_eq!(with(&status, &mine), (0, "200".into()));
    for shown in [&[][..], &theirs] {
        assert_ne!(with(&status, shown).0, 0, "{shown:?}");
    }
    let settings = [
        ("SMART_ROUTER_URL", router.url.as_str()),
        ("SMART_ROUTER_CA_FILE", &ca),
        ("SMART_ROUTER_CERT_FILE", &client.file),
        ("SMART_ROUTER_KEY_FILE", &client.key),
    ];
    assert!(command(&settings, &["status"]).status.success());
    // TLS 1.3 refuses a certificate after the client's handshake has finished, so the alert
    // races with the request: every order must end in the same message.
    let strange = [
        settings[0],
        settings[1],
        ("SMART_ROUTER_CERT_FILE", &stranger.file),
        ("SMART_ROUTER_KEY_FILE", &stranger.key),
    ];
    let document = scratch().join("document.json");
    fs::write(&document, format!("[{:?}]", "y".repeat(1_000_000))).unwrap();
    let document = document.to_str().unwrap();
    for _ in 0..10 {
        for (settings, advice) in [
            (&settings[..2], "set SMART_ROUTER_CERT_FILE"),
            (&strange[..], "does not accept the certificate in SMART_ROUTER_CERT_FILE"),
        ] {
            for args in [&["status"][..], &["merchants", "set", "acme", document]] {
                let refused = command(settings, args);
                let told = String::from_utf8(refused.stderr).unwrap();
                assert_eq!(refused.status.code(), Some(4), "{told}");
                assert!(told.contains(advice), "{told}");
            }
        }
    }

    // Providers have no certificates of ours: they are asked for none where they have an
    // address of their own.
    let router = Router::start(&[&tls[..], &[("ADMIN_BIND", &bind)]].concat());
    let webhook = format!("{}/api/v1/exotel/allocate?CallSid=CA1", router.url);
    assert_eq!(with(&webhook, &[]), (0, "200".into()));
    let status = format!("https://localhost:{admin}/api/v1/status");
    assert_ne!(with(&status, &[]).0, 0);
    assert_eq!(with(&status, &mine), (0, "200".into()));
}

#[test]
fn a_certificate_that_changes_is_shown_from_then_on_and_a_bad_one_is_not() {
    let authority = Authority::create();
    let (ca, own) = (authority.file(), authority.sign("router"));
    let router = Router::start(&[("TLS_CERT_FILE", &own.file), ("TLS_KEY_FILE", &own.key)]);
    let ready = format!("{}/ready", router.url);
    let shown = || {
        let args = ["--cacert", &ca, "-o", "/dev/null", "-w", "%{certs}", &ready];
        let (code, certificates) = curl(&args);
        assert_eq!(code, 0);
        certificates
    };
    let first = shown();
    assert!(first.contains("BEGIN CERTIFICATE"), "{first}");
    // (as long as OpenSSL was told)
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    let mut metrics = Connection::open(([127, 0, 0, 1], router.metrics).into());
    eventually(Duration::from_secs(5), "it is known when it ends", || {
        let text = metrics.get("/metrics").text();
        let mut lines = text.lines();
        let ends = lines.find_map(|line| {
            line.strip_prefix("smart_router_certificate_ends_timestamp_seconds ")?.parse().ok()
        });
        ends.is_some_and(|ends: f64| (ends - now - 2.0 * 86_400.0).abs() < 60.0)
    });
    let next = authority.sign("next");
    // Half of the change: the key does not belong to the certificate.
    fs::copy(&next.file, &own.file).unwrap();
    router.log.contains("the file can't be used", 0);
    assert_eq!(shown(), first);
    fs::copy(&next.key, &own.key).unwrap();
    eventually(Duration::from_secs(5), "the new certificate is shown", || shown() != first);
    let before = router.log.count("the file can't be used");
    fs::write(&own.file, "nonsense").unwrap();
    router.log.contains("the file can't be used", before);
    assert_ne!(shown(), first, "and goes on being shown");
}

#[test]
fn files_that_can_not_be_used_stop_the_start() {
    let authority = Authority::create();
    let (own, other) = (authority.sign("router"), authority.sign("other"));
    let ca = authority.file();
    let (file, key) = (own.file.as_str(), own.key.as_str());
    for (settings, variable) in [
        (vec![("TLS_CERT_FILE", file)], "TLS_KEY_FILE="),
        (vec![("TLS_KEY_FILE", key)], "TLS_KEY_FILE="),
        (vec![("TLS_CLIENT_CA_FILE", ca.as_str())], "TLS_CLIENT_CA_FILE="),
        (vec![("TLS_CERT_FILE", file), ("TLS_KEY_FILE", &other.key)], "TLS_CERT_FILE="),
        (vec![("TLS_CERT_FILE", key), ("TLS_KEY_FILE", key)], "TLS_CERT_FILE="),
        (vec![("TLS_CERT_FILE", file), ("TLS_KEY_FILE", file)], "TLS_CERT_FILE="),
        (vec![("TLS_CERT_FILE", "/nowhere"), ("TLS_KEY_FILE", key)], "TLS_CERT_FILE="),
    ] {
        let told = command(&settings, &["check-config"]);
        let text = String::from_utf8(told.stderr).unwrap();
        assert!(!told.status.success() && text.contains(variable), "{settings:?}: {text}");
        assert!(!text.contains("BEGIN"), "{text}");
    }
}

#[test]
fn a_collector_that_wants_a_certificate_is_named_in_the_log() {
    let authority = Authority::create();
    let (ca, own) = (authority.file(), authority.sign("router"));
    // Any server does that refuses clients without a certificate.
    let collector = Router::start(&[
        ("TLS_CERT_FILE", own.file.as_str()),
        ("TLS_KEY_FILE", &own.key),
        ("TLS_CLIENT_CA_FILE", &ca),
    ]);
    let log = scratch().join("log");
    let (api, metrics) = (free_port().to_string(), free_port().to_string());
    let settings = [
        ("HTTP_PORT", api.as_str()),
        ("METRICS_PORT", &metrics),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", &ca),
    ];
    let file = fs::File::create(&log).unwrap();
    let router = testkit::Router::start_with(&settings, file.into());
    router.allocate("CA1");
    let line = || {
        let log = fs::read_to_string(&log).unwrap();
        log.lines().find(|line| line.contains("does not take spans")).map(str::to_owned)
    };
    eventually(Duration::from_secs(10), "it gives up", || line().is_some());
    assert!(line().unwrap().contains("CertificateRequired"), "{}", line().unwrap());
}
