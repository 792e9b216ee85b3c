//! HTTPS, with curl and the router's own commands as clients.

use std::{
    fs,
    process::{Child, Command, Output, Stdio},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use testkit::{Connection, Log, certificates::Authority, eventually, free_port, program, scratch};

/// A router with a TLS listener.
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
                .is_some_and(|response| response.status == 200)
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

/// Runs curl. Returns its exit code and its output.
fn curl(args: &[&str]) -> (i32, String) {
    let output = Command::new("curl").args(["-s", "-m", "30"]).args(args).output().unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
}

fn command(settings: &[(&str, &str)], args: &[&str]) -> Output {
    program(settings).args(args).output().unwrap()
}

#[test]
fn webhooks_streams_and_commands_use_tls() {
    let authority = Authority::create();
    let (ca, own) = (authority.file(), authority.sign("router"));
    let router = Router::start(&[("TLS_CERT_FILE", &own.file), ("TLS_KEY_FILE", &own.key)]);
    let url = router.url.as_str();
    let (code, response) = curl(&["--cacert", &ca, &format!("{url}/ready")]);
    assert_eq!(code, 0, "{response}");
    assert_eq!(curl(&[&format!("{url}/ready")]).0, 60, "curl does not trust the authority");
    let plain = url.replace("https", "http");
    let (_, response) = curl(&["-i", &format!("{plain}/ready")]);
    assert!(response.starts_with("HTTP/1.1 400 ") && response.contains("https://"), "{response}");
    let (_, metrics) = curl(&[&format!("http://localhost:{}/metrics", router.metrics)]);
    assert!(metrics.contains("smart_router_active_calls"), "the metrics port has no TLS");

    let output = command(
        &[("SMART_ROUTER_URL", url), ("SMART_ROUTER_CA_FILE", &ca)],
        &["call", "--talk", "100ms"],
    );
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("stream to wss://localhost"), "{text}");
    let output = command(&[("SMART_ROUTER_URL", url)], &["status"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(4), "{text}");
    assert!(text.contains("certificate"), "{text}");
}

#[test]
fn clients_without_a_required_certificate_are_refused() {
    let (authority, other_authority) = (Authority::create(), Authority::create());
    let (ca, own, client) = (authority.file(), authority.sign("router"), authority.sign("client"));
    let untrusted = other_authority.sign("client");
    let admin = free_port();
    let bind = format!("127.0.0.1:{admin}");
    let tls = [
        ("TLS_CERT_FILE", own.file.as_str()),
        ("TLS_KEY_FILE", &own.key),
        ("TLS_CLIENT_CA_FILE", &ca),
    ];
    let request = |url: &str, certificate: &[&str]| {
        curl(
            &[&["--cacert", &ca, "-o", "/dev/null", "-w", "%{http_code}"], certificate, &[url]]
                .concat(),
        )
    };
    let trusted = ["--cert", &client.file, "--key", &client.key];
    let other = ["--cert", &untrusted.file, "--key", &untrusted.key];

    let router = Router::start(&tls);
    let status = format!("{}/api/v1/status", router.url);
    assert_eq!(request(&status, &trusted), (0, "200".into()));
    for certificate in [&[][..], &other] {
        assert_ne!(request(&status, certificate).0, 0, "{certificate:?}");
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
    let untrusted = [
        settings[0],
        settings[1],
        ("SMART_ROUTER_CERT_FILE", &untrusted.file),
        ("SMART_ROUTER_KEY_FILE", &untrusted.key),
    ];
    let document = scratch().join("document.json");
    fs::write(&document, format!("[{:?}]", "y".repeat(1_000_000))).unwrap();
    let document = document.to_str().unwrap();
    for _ in 0..10 {
        for (settings, advice) in [
            (&settings[..2], "set SMART_ROUTER_CERT_FILE"),
            (&untrusted[..], "does not accept the certificate in SMART_ROUTER_CERT_FILE"),
        ] {
            for args in [&["status"][..], &["merchants", "set", "acme", document]] {
                let refused = command(settings, args);
                let text = String::from_utf8(refused.stderr).unwrap();
                assert_eq!(refused.status.code(), Some(4), "{text}");
                assert!(text.contains(advice), "{text}");
            }
        }
    }

    // Providers have no client certificate: with ADMIN_BIND, the address of the webhooks does
    // not require one.
    let router = Router::start(&[&tls[..], &[("ADMIN_BIND", &bind)]].concat());
    let webhook = format!("{}/api/v1/exotel/allocate?CallSid=CA1", router.url);
    assert_eq!(request(&webhook, &[]), (0, "200".into()));
    let status = format!("https://localhost:{admin}/api/v1/status");
    assert_ne!(request(&status, &[]).0, 0);
    assert_eq!(request(&status, &trusted), (0, "200".into()));
}

#[test]
fn a_changed_certificate_is_reloaded_unless_it_is_invalid() {
    let authority = Authority::create();
    let (ca, own) = (authority.file(), authority.sign("router"));
    let router = Router::start(&[("TLS_CERT_FILE", &own.file), ("TLS_KEY_FILE", &own.key)]);
    let ready = format!("{}/ready", router.url);
    let served_certificate = || {
        let args = ["--cacert", &ca, "-o", "/dev/null", "-w", "%{certs}", &ready];
        let (code, certificates) = curl(&args);
        assert_eq!(code, 0);
        certificates
    };
    let first = served_certificate();
    assert!(first.contains("BEGIN CERTIFICATE"), "{first}");
    // The test authority issues certificates for two days.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    let mut metrics = Connection::open(([127, 0, 0, 1], router.metrics).into());
    eventually(Duration::from_secs(5), "the metric has the expiry time", || {
        let text = metrics.get("/metrics").text();
        let mut lines = text.lines();
        let expiry = lines.find_map(|line| {
            line.strip_prefix("smart_router_certificate_ends_timestamp_seconds ")?.parse().ok()
        });
        expiry.is_some_and(|expiry: f64| (expiry - now - 2.0 * 86_400.0).abs() < 60.0)
    });
    let next = authority.sign("next");
    // After the first file is replaced, the key does not match the certificate.
    fs::copy(&next.file, &own.file).unwrap();
    router.log.wait_for("the file is unusable", 0);
    assert_eq!(served_certificate(), first);
    fs::copy(&next.key, &own.key).unwrap();
    eventually(Duration::from_secs(5), "the new certificate is served", || {
        served_certificate() != first
    });
    let before = router.log.count("the file is unusable");
    fs::write(&own.file, "nonsense").unwrap();
    router.log.wait_for("the file is unusable", before);
    assert_ne!(served_certificate(), first, "the last valid certificate is still served");
}

#[test]
fn unusable_tls_files_fail_the_start() {
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
        let output = command(&settings, &["check-config"]);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && text.contains(variable), "{settings:?}: {text}");
        assert!(!text.contains("BEGIN"), "{text}");
    }
}

#[test]
fn a_collector_that_requires_a_certificate_is_logged() {
    let authority = Authority::create();
    let (ca, own) = (authority.file(), authority.sign("router"));
    // A router that requires client certificates stands in for the collector.
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
        log.lines().find(|line| line.contains("does not accept spans")).map(str::to_owned)
    };
    eventually(Duration::from_secs(10), "the export fails", || line().is_some());
    assert!(line().unwrap().contains("CertificateRequired"), "{}", line().unwrap());
}
