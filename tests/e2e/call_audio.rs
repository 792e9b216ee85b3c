//! `smart-router call --audio` and `load --media --audio`: a caller's audio, and the recording of
//! the agent's.

use std::{
    f64::consts::PI,
    path::{Path, PathBuf},
    process::Output,
};

use futures_util::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use hound::{SampleFormat, WavReader, WavSpec, WavWriter};
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::{
    WebSocketStream, accept_async,
    tungstenite::{
        Message,
        protocol::{CloseFrame, frame::coding::CloseCode},
    },
};

use testkit::{Router, program};

type Agent = WebSocketStream<TcpStream>;

const HELLO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/hello.wav");

/// A directory for the files of one test.
struct Files(PathBuf);

impl Files {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("call-audio-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Half a second at 8,000 Hz: a tone whose level rises.
fn rising_tone() -> Vec<i16> {
    let sample = |it: u32| (2.0 * PI * 440.0 * f64::from(it) / 8_000.0).sin() * f64::from(it) * 4.0;
    (0..4_000).map(|it| sample(it) as i16).collect()
}

fn write_wav(path: &str, samples: &[i16], channels: u16) {
    let format = SampleFormat::Int;
    let spec = WavSpec { channels, sample_rate: 8_000, bits_per_sample: 16, sample_format: format };
    let mut writer = WavWriter::create(path, spec).unwrap();
    for &sample in samples {
        (0..channels).for_each(|_| writer.write_sample(sample).unwrap());
    }
    writer.finalize().unwrap();
}

fn read_wav(path: &str) -> (u32, Vec<i16>) {
    let reader = WavReader::open(path).unwrap();
    let spec = reader.spec();
    assert_eq!((spec.channels, spec.bits_per_sample), (1, 16));
    (spec.sample_rate, reader.into_samples().map(Result::unwrap).collect())
}

fn run(router: &Router, args: &[&str]) -> Output {
    let url = format!("http://{}", router.address);
    program(&[]).args(args).args(["--router", &url]).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_call_sends_a_file_and_records_what_comes_back() {
    let files = Files::new("record");
    let (audio, recorded) = (files.path("tone.wav"), files.path("out.wav"));
    let tone = rising_tone();
    write_wav(&audio, &tone, 2);
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 1}"#)]);
    for provider in ["twilio", "plivo", "exotel", "signalwire", "telnyx", "vonage", "jambonz"] {
        let options = ["--audio", &audio, "--record", &recorded];
        let output = run(&router, &[&["call", "--provider", provider], &options[..]].concat());
        let printed = text(&output.stdout);
        assert!(output.status.success(), "{provider}: {printed}{}", text(&output.stderr));
        assert!(printed.contains("correlation with "), "{provider}: {printed}");
        assert!(printed.contains("voice-agent-0 is free again"), "{provider}: {printed}");
        let (rate, samples) = read_wav(&recorded);
        let step = if provider == "vonage" { 2 } else { 1 };
        assert_eq!(rate, 8_000 * step as u32, "{provider}");
        assert!(samples.len() >= tone.len() * step, "{provider}: {} samples", samples.len());
        // The simulated agent echoes each message, so that nothing is shifted. μ-law has 13 bits;
        // Vonage's rate is another one, and its filter has no samples beyond the ends.
        let tolerance = |sample: i16| match provider {
            "exotel" | "jambonz" => 1,
            "vonage" => 200,
            _ => 8 + i32::from(sample).abs() / 25,
        };
        let inner = if provider == "vonage" { 50..tone.len() - 50 } else { 0..tone.len() };
        for index in inner {
            let (sent, heard) = (tone[index], samples[index * step]);
            let error = (i32::from(sent) - i32::from(heard)).abs();
            assert!(error <= tolerance(sent), "{provider}: {sent} came back as {heard} at {index}");
        }
        std::fs::remove_file(&recorded).unwrap();
    }
}

#[test]
fn silence_follows_the_file_until_the_end_of_the_conversation() {
    let files = Files::new("silence");
    let (audio, recorded) = (files.path("tone.wav"), files.path("out.wav"));
    write_wav(&audio, &rising_tone(), 1);
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 1}"#)]);
    let options = ["--talk", "800ms", "--audio", &audio, "--record", &recorded];
    let output = run(&router, &[&["call"], &options[..]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let (_, samples) = read_wav(&recorded);
    assert!(samples.len() >= 6_400, "{}", samples.len());
    assert!(samples[4_000..].iter().all(|&sample| sample == 0));
}

#[test]
fn load_compares_the_audio_of_every_stream() {
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 4}"#)]);
    for provider in ["twilio", "vonage"] {
        let calls = ["load", "--media", "--json", "-c", "4", "--calls", "4", "--audio", HELLO];
        let output = run(&router, &[&calls[..], &["--provider", provider]].concat());
        assert!(output.status.success(), "{provider}: {}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let audio = &report["media"]["audio"];
        assert!(audio["compared"].as_u64() >= Some(4), "{provider}: {report}");
        assert_eq!(audio["differing"], 0, "{provider}: {report}");
        assert!(audio["lowest_correlation"].as_f64() > Some(0.99), "{provider}: {report}");
    }
}

/// Plays the audio of one caller to another.
async fn cross(mut from: SplitStream<Agent>, mut to: SplitSink<Agent, Message>) {
    while let Some(Ok(message)) = from.next().await {
        if message.is_binary() && to.send(message).await.is_err() {
            return;
        }
    }
    let _ = to.close().await;
}

#[tokio::test]
async fn load_notices_the_audio_of_another_call() {
    let files = Files::new("crossed");
    let other = files.path("tone.wav");
    write_wav(&other, &rising_tone(), 1);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let agents = tokio::spawn(async move {
        let mut sides = Vec::new();
        for _ in 0..2 {
            let (connection, _) = listener.accept().await.unwrap();
            sides.push(accept_async(connection).await.unwrap().split());
        }
        let [(one_out, one_in), (other_out, other_in)] = sides.try_into().unwrap();
        tokio::join!(cross(one_in, other_out), cross(other_in, one_out));
    });
    let pods = format!("agent-0={address},agent-1={address}");
    let router = Router::start(&[("PODS", &pods), ("TIER_CONFIG", r#"{"gold": 2}"#)]);
    let output = tokio::task::spawn_blocking(move || {
        let calls = ["load", "--media", "--json", "-c", "2", "--calls", "2", "--repeat", "0"];
        let options = ["--provider", "vonage", "--audio", HELLO, "--audio", &other];
        run(&router, &[&calls[..], &options].concat())
    });
    let output = output.await.unwrap();
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(6), "{errors}");
    assert!(errors.contains("the audio of 2 of 2 streams did not come back"), "{errors}");
    agents.await.unwrap();
}

#[test]
fn files_that_are_no_audio_are_refused_before_the_call() {
    let files = Files::new("refused");
    let (text_file, empty) = (files.path("text.wav"), files.path("empty.wav"));
    std::fs::write(&text_file, "not audio").unwrap();
    write_wav(&empty, &[], 1);
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 1}"#)]);
    let missing = files.path("missing.wav");
    let nowhere = files.path("no/directory/out.wav");
    for (args, reason) in [
        (vec!["call", "--audio", &text_file], "cannot use"),
        (vec!["call", "--audio", &missing], "cannot use"),
        (vec!["call", "--audio", &empty], "has no audio"),
        (vec!["load", "--media", "--audio", &text_file], "cannot use"),
        (vec!["call", "--audio", HELLO, "--record", &nowhere], "cannot write"),
    ] {
        let output = run(&router, &args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(text(&output.stderr).contains(reason), "{args:?}: {}", text(&output.stderr));
    }
    assert_eq!(router.status()["active_calls"], 0);
    assert!(!Path::new(&nowhere).exists());
    let without = run(&router, &["call", "--record", &missing]);
    assert_eq!(without.status.code(), Some(2), "--record needs --audio");
}

/// An agent that accepts one stream, and after three messages closes it with 1000 or stays silent.
async fn short_agent(closes: bool) -> (Router, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let pods = format!("agent-0={}", listener.local_addr().unwrap());
    let agent = tokio::spawn(async move {
        let (connection, _) = listener.accept().await.unwrap();
        let mut socket = accept_async(connection).await.unwrap();
        for _ in 0..3 {
            socket.next().await.unwrap().unwrap();
        }
        if closes {
            let code = CloseFrame { code: CloseCode::Normal, reason: "".into() };
            socket.close(Some(code)).await.unwrap();
        }
        while socket.next().await.is_some_and(|message| message.is_ok()) {}
    });
    (Router::start(&[("PODS", &pods), ("TIER_CONFIG", r#"{"gold": 1}"#)]), agent)
}

#[tokio::test]
async fn an_agent_without_audio_fails_the_call() {
    for (closes, words) in [(true, "the agent hung up"), (false, "0.0 s of audio came back")] {
        let (router, agent) = short_agent(closes).await;
        let (router, output) = tokio::task::spawn_blocking(move || {
            let output = run(&router, &["call", "--audio", HELLO]);
            (router, output)
        })
        .await
        .unwrap();
        let (printed, errors) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(1), "{printed}{errors}");
        assert!(printed.contains(words), "{printed}");
        assert!(
            errors.contains("no audio came back: is agent-0 an agent that echoes?"),
            "{errors}"
        );
        agent.await.unwrap();
        assert_eq!(router.status()["active_calls"], 0);
    }
}
