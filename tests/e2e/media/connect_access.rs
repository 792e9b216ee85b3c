//! Allocate at connect: secrets, signatures and limits.

use super::{
    connect::{CONNECTED, SECRET, begin, start},
    *,
};
use crate::signatures::{sha1, sha256};
use data_encoding::BASE64;
use testkit::scratch;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

const CALL: &str = "CA00000000000000000000000000000001";
const MEDIA_URL: &str = "wss://media.example.com";

/// The response to a handshake, whose body must be empty.
async fn status(router: &Router, path: &str, headers: &str) -> u16 {
    let (status, mut stream) = raw_handshake(router, path, &format!("{UPGRADE}{headers}")).await;
    if status != 101 {
        stream.shutdown().await.unwrap();
        let mut body = Vec::new();
        stream.read_to_end(&mut body).await.unwrap();
        assert_eq!(body, b"", "no body: {path}");
    }
    status
}

/// Opens a stream with further headers, and sends the opening of `CALL`.
async fn open(router: &Router, path: &str, headers: &[(&'static str, &str)]) -> Provider {
    let url = format!("ws://{}{path}", router.address);
    let mut request = url.into_client_request().unwrap();
    for (name, value) in headers {
        request.headers_mut().insert(*name, value.parse().unwrap());
    }
    let mut provider = connect_async(request).await.expect("the stream is accepted").0;
    for message in [CONNECTED, &start(CALL)] {
        send(&mut provider, message).await;
    }
    provider
}

#[tokio::test]
async fn a_wrong_or_missing_secret_is_refused_and_not_logged() {
    let server = AgentServer::start().await;
    let pods = format!("agent-0={}", server.address);
    let admin = format!("127.0.0.1:{}", testkit::free_port());
    let settings = [
        ("PODS", pods.as_str()),
        ("CONNECT_SECRET", SECRET),
        ("ADMIN_BIND", &admin),
        ("LOG_LEVEL", "info"),
        ("RATE_LIMIT", "off"),
        ("TIER_CONFIG", r#"{"gold": 1}"#),
    ];
    let (router, log) = Router::start_logged(&settings);
    let guessed = "guessed-secret-0123456789";
    for (path, reason) in [
        ("/connect/twilio".to_owned(), "missing_secret"),
        ("/connect/exotel?merchant_id=acme".to_owned(), "missing_secret"),
        ("/connect/twilio/".to_owned(), "wrong_secret"),
        (format!("/connect/twilio/{guessed}"), "wrong_secret"),
        (format!("/connect/twilio/{}", &SECRET[1..]), "wrong_secret"),
        (format!("/connect/twilio/{SECRET}/"), "wrong_secret"),
        (format!("/connect/twilio/{SECRET}/more"), "wrong_secret"),
        (format!("/connect/twilio?secret={SECRET}"), "missing_secret"),
    ] {
        let before = refusals(&router, reason);
        assert_eq!(status(&router, &path, "").await, 403, "{path}");
        assert_eq!(refusals(&router, reason), before + 1, "{path}");
    }
    for path in ["/connect/", "/connect/unknown", "/connect/Twilio"] {
        assert_eq!(status(&router, &format!("{path}/{SECRET}"), "").await, 404, "{path}");
    }
    let path = format!("/connect/twilio/{SECRET}");
    assert_eq!(status(&router, &format!("{path}?flow=%FF"), "").await, 400);
    let (code, _) = raw_handshake(&router, &path, "").await;
    assert_eq!(code, 426);
    // Another listener than the gateway's does not know the URL, and does not show it either.
    assert_eq!(router.connect_as_admin().get(&path).status, 404);
    assert!(server.is_untouched().await);
    let mut provider = open(&router, &path, &[]).await;
    let mut agent = begin(&mut provider, &server, CALL).await;
    agent.close(None).await.unwrap();
    close_code(&mut provider).await;
    log.wait_for("\"message\":\"stream\"", 0);
    let text = log.text();
    assert!(text.contains("\"reason\":\"wrong_secret\""), "{text}");
    assert!(text.contains("/connect/"), "the access log of the other listener: {text}");
    for secret in [SECRET, &SECRET[1..], guessed] {
        assert!(!text.contains(secret), "{text}");
    }
}

#[tokio::test]
async fn secrets_are_rotated_with_their_file() {
    let path = scratch().join("connect-secret");
    std::fs::write(&path, SECRET).unwrap();
    let file = path.display().to_string();
    let (router, _server) =
        router_with_agent(&[("CONNECT_SECRET_FILE", &file), ("RATE_LIMIT", "off")]).await;
    let next = "next-secret-0123456789";
    assert_eq!(status(&router, &format!("/connect/twilio/{next}"), "").await, 403);
    std::fs::write(&path, format!("{SECRET}\n{next}\n")).unwrap();
    let both = [SECRET, next].map(|secret| format!("/connect/twilio/{secret}"));
    let started = std::time::Instant::now();
    while status(&router, &both[1], "").await != 101 {
        assert!(started.elapsed() < TIMEOUT, "the file is read again");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(status(&router, &both[0], "").await, 101);
}

#[tokio::test]
async fn without_a_secret_nothing_is_allocated_at_connect() {
    let (router, server) = router_with_agent(&[("RATE_LIMIT", "off")]).await;
    for path in ["/connect/twilio", "/connect/twilio/", "/connect/vonage/0123456789abcdef"] {
        assert_eq!(status(&router, path, "").await, 403, "{path}");
    }
    assert_eq!(refusals(&router, "connect_off"), 3);
    assert!(server.is_untouched().await);
}

#[tokio::test]
async fn providers_that_are_not_served_are_unknown() {
    let settings = [("PROVIDERS", "twilio"), ("CONNECT_SECRET", SECRET), ("RATE_LIMIT", "off")];
    let (router, _server) = router_with_agent(&settings).await;
    assert_eq!(status(&router, &format!("/connect/plivo/{SECRET}"), "").await, 404);
    assert_eq!(refusals(&router, "unknown_provider"), 1);
    assert_eq!(status(&router, &format!("/connect/twilio/{SECRET}"), "").await, 101);
}

#[tokio::test]
async fn short_secrets_prevent_the_start() {
    for secret in ["short", "0123456789/abcdef"] {
        let output = testkit::program(&[("CONNECT_SECRET", secret)]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success());
        assert!(text.contains("CONNECT_SECRET") && !text.contains(secret), "{text}");
    }
}

#[tokio::test]
async fn guesses_are_rate_limited_and_streams_are_not() {
    let settings = [("CONNECT_SECRET", SECRET), ("RATE_LIMIT", "1")];
    let (router, _server) = router_with_agent(&settings).await;
    let mut limited = 0;
    for guess in 0..12 {
        let path = format!("/connect/twilio/guess-{guess:016}");
        limited += u64::from(status(&router, &path, "").await == 429);
    }
    assert!(limited > 0);
    assert_eq!(refusals(&router, "rate_limited"), limited);
    for _ in 0..8 {
        assert_eq!(status(&router, &format!("/connect/twilio/{SECRET}"), "").await, 101);
    }
}

#[tokio::test]
async fn twilio_signs_the_handshake() {
    let settings = [
        ("MEDIA_URL", MEDIA_URL),
        ("PUBLIC_URL", "https://router.example.com"),
        ("TWILIO_AUTH_TOKEN", "old-token,new-token"),
        ("CONNECT_SECRET", SECRET),
        ("RATE_LIMIT", "off"),
    ];
    let (router, server) = router_with_agent(&settings).await;
    let path = "/connect/twilio";
    let sign = |token: &str, url: &str| format!("X-Twilio-Signature: {}\r\n", sha1(token, url));
    let url = format!("{MEDIA_URL}{path}");
    for (headers, reason) in [
        (String::new(), "missing_signature"),
        (sign("other-token", &url), "wrong_signature"),
        (sign("new-token", &format!("{url}/")), "wrong_signature"),
        (sign("new-token", &url.replace("wss", "https")), "wrong_signature"),
        // The host of the request is the client's choice.
        (sign("new-token", "wss://test/connect/twilio"), "wrong_signature"),
    ] {
        let before = refusals(&router, reason);
        assert_eq!(status(&router, path, &headers).await, 403, "{headers}");
        assert_eq!(refusals(&router, reason), before + 1, "{headers}");
    }
    // The secret does not replace the signature.
    assert_eq!(status(&router, &format!("{path}/{SECRET}"), "").await, 403);
    for base in [MEDIA_URL, "wss://media.example.com:443", "wss://router.example.com"] {
        for token in ["old-token", "new-token"] {
            let signature = sha1(token, &format!("{base}{path}"));
            let mut provider = open(&router, path, &[("x-twilio-signature", &signature)]).await;
            let mut agent = begin(&mut provider, &server, CALL).await;
            agent.close(None).await.unwrap();
            close_code(&mut provider).await;
            expect_free(&router, 1);
        }
    }
    // As in a signed webhook, the call id has the provider's format.
    let (status, mut stream) =
        raw_handshake(&router, path, &format!("{UPGRADE}{}", sign("new-token", &url))).await;
    assert_eq!(status, 101);
    let message = start("CA1");
    let mut frame = vec![0x81, 0x80 | 126, 0, message.len() as u8, 0, 0, 0, 0];
    frame.extend_from_slice(message.as_bytes());
    stream.write_all(&frame).await.unwrap();
    let mut close = [0; 4];
    timeout(TIMEOUT, stream.read_exact(&mut close)).await.unwrap().unwrap();
    assert_eq!(u16::from_be_bytes([close[2], close[3]]), 1008);
}

#[tokio::test]
async fn plivo_signs_the_handshake() {
    let settings = [
        ("MEDIA_URL", MEDIA_URL),
        ("PUBLIC_URL", "https://router.example.com"),
        ("PLIVO_AUTH_TOKEN", "plivo-token"),
        ("RATE_LIMIT", "off"),
    ];
    let (router, server) = router_with_agent(&settings).await;
    // The query is signed in sorted order.
    let path = "/connect/plivo?template=hello&merchant_id=acme";
    let signed = format!("{MEDIA_URL}/connect/plivo?merchant_id=acme&template=hello.nonce-1");
    let sign = |token: &str| BASE64.encode(&sha256(token, &signed));
    let headers = |signature: &str, nonce: &str| {
        format!("X-Plivo-Signature-V3: {signature}\r\nX-Plivo-Signature-V3-Nonce: {nonce}\r\n")
    };
    for wrong in [
        String::new(),
        headers(&sign("other"), "nonce-1"),
        headers(&sign("plivo-token"), "nonce-2"),
        format!("X-Plivo-Signature-V3: {}\r\n", sign("plivo-token")),
    ] {
        assert_eq!(status(&router, path, &wrong).await, 403, "{wrong}");
    }
    let own = headers(&sign("plivo-token"), "nonce-1");
    assert_eq!(status(&router, "/connect/plivo?merchant_id=other", &own).await, 403);
    assert!(server.is_untouched().await);
    assert_eq!(status(&router, path, &own).await, 101);
}

#[tokio::test]
async fn streams_that_are_opening_count_against_the_limit() {
    let settings = [("CONNECT_SECRET", SECRET), ("MAX_STREAMS", "1")];
    let (router, server) = router_with_agent(&settings).await;
    let path = format!("/connect/twilio/{SECRET}");
    let (opened, first) = raw_handshake(&router, &path, UPGRADE).await;
    assert_eq!(opened, 101);
    assert_eq!(status(&router, &path, "").await, 503);
    let url = stream_url(&router, "CA9");
    assert_eq!(status(&router, path_of(&url), "").await, 503);
    assert_eq!(refusals(&router, "max_streams"), 2);
    assert!(server.is_untouched().await);
    drop(first);
    let started = std::time::Instant::now();
    while status(&router, &path, "").await != 101 {
        assert!(started.elapsed() < TIMEOUT, "a stream that has ended counts no more");
    }
}

#[tokio::test]
async fn a_stream_that_is_opening_is_closed_when_the_router_stops() {
    let (mut router, _server) = router_with_agent(&[("CONNECT_SECRET", SECRET)]).await;
    let url = format!("ws://{}/connect/twilio/{SECRET}", router.address);
    let mut provider = dial(&url).await;
    send(&mut provider, CONNECTED).await;
    router.signal("TERM");
    assert_eq!(close_code(&mut provider).await, Some(1012));
    assert_eq!(router.wait_for_exit(TIMEOUT), Some(0));
}
