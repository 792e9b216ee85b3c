//! The cost of parsing and verifying a webhook, for each signature scheme:
//! `cargo bench --bench verify`

use std::{process::Command, time::Instant};

use aws_lc_rs::{
    hmac,
    signature::{Ed25519KeyPair, KeyPair},
};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use data_encoding::{BASE64, BASE64URL_NOPAD, HEXLOWER};
use telephony::{BodyFormat, Coverage, Params, Provider, Secret, Webhook};

const BASE: &str = "https://router.example.com";
const SIGNED_AT: u64 = 1_750_000_000;
const ITERATIONS: usize = 5_000;
const ROUNDS: usize = 9;
const FORM: &str = "AccountSid=AC00000000000000000000000000000001&ApiVersion=2010-04-01&CallSid=CA00000000000000000000000000000001&CallStatus=ringing&Called=%2B18005551212&CalledCity=&CalledCountry=US&Caller=%2B14158675310&CallerCountry=US&Direction=inbound&From=%2B14158675310&To=%2B18005551212";

fn sign(algorithm: hmac::Algorithm, key: &str, text: &str) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(algorithm, key.as_bytes()), text.as_bytes()).as_ref().to_vec()
}

/// The form's names and values, sorted and concatenated.
fn sorted_params() -> String {
    let params = Params::from_form(FORM).unwrap();
    let mut pairs: Vec<(&str, &str)> = params.iter().collect();
    pairs.sort_unstable();
    pairs.into_iter().map(|(name, value)| format!("{name}{value}")).collect()
}

fn measure(
    provider: Provider,
    limit: f64,
    key: &str,
    target: &str,
    headers: &[(&'static str, String)],
    body: &str,
    is_json: bool,
) {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        map.insert(HeaderName::from_static(name), HeaderValue::try_from(value).unwrap());
    }
    let keys = [Secret::from(key)];
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let started = Instant::now();
            for _ in 0..ITERATIONS {
                let webhook = Webhook {
                    is_get: false,
                    public_url: BASE,
                    target,
                    headers: &map,
                    body: body.as_bytes(),
                    body_format: if is_json { BodyFormat::Json } else { BodyFormat::Form },
                    received_at: SIGNED_AT,
                    query: Params::default(),
                    body_params: Params::default(),
                    coverage: Coverage::Everything,
                    fingerprint: None,
                };
                let webhook = webhook.read().unwrap();
                std::hint::black_box(provider.dialect().verify(&webhook, &keys)).unwrap();
            }
            started.elapsed().as_nanos() as f64 / ITERATIONS as f64 / 1_000.0
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    let median = rounds[ROUNDS / 2];
    let note = if median <= limit { "" } else { "  TOO SLOW" };
    println!("{:<12} {median:8.2} µs   (allowed {limit:.0}){note}", provider.as_str());
    assert!(median <= limit, "{provider}: {median:.1} µs");
}

fn main() {
    let commit = Command::new("git").args(["rev-parse", "--short", "HEAD"]).output();
    let commit = commit.map(|it| String::from_utf8_lossy(&it.stdout).trim().to_owned());
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpus.lines().find(|line| line.starts_with("model name")).unwrap_or_default();
    println!(
        "{} | {} | read and verify, form of 12 fields",
        commit.unwrap_or_default(),
        cpu.split(": ").last().unwrap_or_default()
    );

    let target = "/api/v1/x/allocate?merchant_id=acme&template=order-confirmation";
    let key = "12345678901234567890123456789012";
    let text = format!("{BASE}{target}{}", sorted_params());
    let signature = BASE64.encode(&sign(hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY, key, &text));
    measure(
        Provider::Twilio,
        20.0,
        key,
        target,
        &[("x-twilio-signature", signature.clone())],
        FORM,
        false,
    );
    measure(
        Provider::SignalWire,
        20.0,
        key,
        target,
        &[("x-signalwire-signature", signature)],
        FORM,
        false,
    );
    let text = format!("{BASE}{target}.{}.12345", sorted_params());
    let signature = BASE64.encode(&sign(hmac::HMAC_SHA256, key, &text));
    let headers =
        [("x-plivo-signature-v3", signature), ("x-plivo-signature-v3-nonce", "12345".into())];
    measure(Provider::Plivo, 20.0, key, target, &headers, FORM, false);
    measure(Provider::Exotel, 20.0, key, &format!("{target}&auth_token={key}"), &[], FORM, false);
    let body = r#"{"call_sid":"aad0115d-ec21-40db-aa02-31b7b01540c5","direction":"inbound","from":"+15083084809","to":"+15083728363","call_status":"trying"}"#;
    let signature = HEXLOWER.encode(&sign(hmac::HMAC_SHA256, key, &format!("{SIGNED_AT}.{body}")));
    measure(
        Provider::Jambonz,
        20.0,
        key,
        target,
        &[("jambonz-signature", format!("t={SIGNED_AT},v1={signature}"))],
        body,
        true,
    );
    let hash = HEXLOWER
        .encode(aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, body.as_bytes()).as_ref());
    let part = |text: String| BASE64URL_NOPAD.encode(text.as_bytes());
    let signed = format!(
        "{}.{}",
        part(r#"{"alg":"HS256","typ":"JWT"}"#.into()),
        part(format!(r#"{{"iat":{SIGNED_AT},"jti":"1","iss":"Vonage","payload_hash":"{hash}"}}"#))
    );
    let token =
        format!("{signed}.{}", BASE64URL_NOPAD.encode(&sign(hmac::HMAC_SHA256, key, &signed)));
    measure(
        Provider::Vonage,
        20.0,
        key,
        target,
        &[("authorization", format!("Bearer {token}"))],
        body,
        true,
    );
    let pair = Ed25519KeyPair::from_seed_unchecked(&[7; 32]).unwrap();
    let signature = BASE64.encode(pair.sign(format!("{SIGNED_AT}|{FORM}").as_bytes()).as_ref());
    let headers =
        [("telnyx-signature-ed25519", signature), ("telnyx-timestamp", SIGNED_AT.to_string())];
    let public = BASE64.encode(pair.public_key().as_ref());
    measure(Provider::Telnyx, 80.0, &public, target, &headers, FORM, false);
}
