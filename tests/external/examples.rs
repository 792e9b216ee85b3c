//! The agents of `examples/` behind the media gateway, with callers of every provider. The agents
//! have no code for the router.

use std::{
    collections::HashSet,
    fs,
    path::PathBuf,
    process::{Command, Output},
    time::Duration,
};

use hound::{WavReader, WavSpec, WavWriter};
use serde_json::Value;

use testkit::{Process, Router, eventually, free_port, program, run_external_check, scratch};

use crate::agent_stacks::{checkers, is_listening};

const SECOND: Duration = Duration::from_secs(1);
/// Simultaneous calls; each process of an agent serves half of them.
const CALLS: usize = 10;

fn python(script: &str) -> Command {
    let mut command = Command::new(checkers("venv/bin/python"));
    command.arg(script).current_dir(testkit::ROOT);
    command
}

/// Node finds the packages of a script beside it.
fn node_agent() -> Command {
    let script = checkers("examples_node_agent.mjs");
    let source = fs::read(format!("{}/examples/node/agent.mjs", testkit::ROOT)).unwrap();
    fs::write(&script, source).unwrap();
    let mut command = Command::new("node");
    command.arg(script);
    command
}

/// Different audio for each call, so that audio of another call is noticed: the example at
/// different speeds.
fn write_clips() -> Vec<PathBuf> {
    let reader = WavReader::open(format!("{}/examples/hello.wav", testkit::ROOT)).unwrap();
    let spec = reader.spec();
    let samples: Vec<i16> = reader.into_samples().map(Result::unwrap).collect();
    let directory = scratch();
    let write = |number: usize| {
        let path = directory.join(format!("{number}.wav"));
        let sample_rate = spec.sample_rate * (10 + number as u32) / 12;
        let mut writer = WavWriter::create(&path, WavSpec { sample_rate, ..spec }).unwrap();
        samples.iter().for_each(|&sample| writer.write_sample(sample).unwrap());
        writer.finalize().unwrap();
        path
    };
    (0..CALLS).map(write).collect()
}

/// A router with ten exclusive pods, on two processes of an agent.
struct Setup {
    clips: Vec<PathBuf>,
    _agents: [Process; 2],
    router: Router,
}

impl Drop for Setup {
    fn drop(&mut self) {
        let directory = self.clips.first().and_then(|clip| clip.parent());
        let _ = directory.map(fs::remove_dir_all);
    }
}

impl Setup {
    fn new(agent: impl Fn() -> Command) -> Self {
        let ports = [free_port(), free_port()];
        let agents = ports.map(|port| Process::start(agent().arg(port.to_string())));
        for port in ports {
            // Pipecat loads its libraries for some seconds.
            eventually(30 * SECOND, "the agent listens", || is_listening(port));
        }
        let pod = |number: usize| format!("agent-{number}=127.0.0.1:{}", ports[number % 2]);
        let router = Router::start(&[
            ("PODS", &(0..CALLS).map(pod).collect::<Vec<_>>().join(",")),
            ("TIER_CONFIG", &format!(r#"{{"gold": {CALLS}}}"#)),
            ("RATE_LIMIT", "off"),
            ("LOG_LEVEL", "error"),
        ]);
        Self { clips: write_clips(), _agents: agents, router }
    }

    fn run(&self, args: &[&str]) -> Output {
        let url = format!("http://{}", self.router.address);
        let mut command = program(&[]);
        command.args(args).args(["--router", &url]).current_dir(testkit::ROOT);
        command.output().unwrap()
    }

    /// Places ten calls at the same time, and expects their audio to come back.
    fn check_calls(&self, provider: &str) {
        let calls = CALLS.to_string();
        let load = ["load", "--media", "--json", "-c", &calls, "--calls", &calls];
        let clips = self.clips.iter().flat_map(|clip| ["--audio", clip.to_str().unwrap()]);
        let options = ["--provider", provider].into_iter().chain(clips);
        let output = self.run(&load.into_iter().chain(options).collect::<Vec<_>>());
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{provider}: {errors}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let audio = &report["media"]["audio"];
        assert_eq!(report["overlap"], CALLS, "{provider}: {report}");
        assert_eq!(audio["compared"], report["calls"], "{provider}: {report}");
        assert!(audio["lowest_correlation"].as_f64() > Some(0.95), "{provider}: {report}");
        eventually(3 * SECOND, "every pod is free", || {
            self.router.status()["pools"]["gold"]["available"] == CALLS
        });
    }

    /// Checks with the events that each pod had one call at a time.
    fn check_events(&self) {
        let (_, page) = self.router.get("/api/v1/events?limit=1000");
        let (mut busy, mut allocated) = (HashSet::new(), 0);
        let events = page["events"].as_array().unwrap();
        let text = |event: &Value, name: &str| event[name].as_str().unwrap_or_default().to_owned();
        // The latest event comes first.
        for event in events.iter().rev() {
            let pod = text(event, "pod_name");
            match event["event"].as_str() {
                Some("allocated") => {
                    allocated += 1;
                    assert!(busy.insert(pod), "a pod was given twice: {event}");
                }
                Some("ended") => assert!(busy.remove(&pod), "{event}"),
                Some("attached") => assert!(busy.contains(&pod), "{event}"),
                _ => {}
            }
        }
        assert!(busy.is_empty(), "{busy:?}");
        assert!(allocated >= CALLS, "{page}");
    }

    /// Calls of each provider in turn.
    fn check(&self, providers: &[&str]) {
        for provider in providers {
            self.check_calls(provider);
        }
        self.check_events();
    }
}

#[test]
fn the_pipecat_bot_returns_the_audio_of_ten_calls_of_each_provider() {
    let setup = Setup::new(|| python("examples/pipecat/bot.py"));
    setup.check(&["twilio", "signalwire", "plivo", "exotel", "telnyx"]);
}

#[test]
fn the_fastapi_agent_returns_the_audio_of_ten_calls_of_each_provider() {
    let setup = Setup::new(|| python("examples/fastapi/agent.py"));
    setup.check(&["twilio", "signalwire", "plivo", "exotel", "telnyx", "vonage", "jambonz"]);
}

#[test]
fn the_node_agent_returns_the_audio_of_ten_calls_of_each_provider() {
    let setup = Setup::new(node_agent);
    setup.check(&["twilio", "signalwire", "plivo", "exotel", "telnyx", "vonage", "jambonz"]);
}

#[test]
fn the_python_module_renews_releases_and_drains() {
    let router = Router::start_without_gateway(&[
        ("PODS", "agent-0=127.0.0.1:1"),
        ("TIER_CONFIG", r#"{"basic": {"type": "shared", "target": 1, "max_concurrent": 2}}"#),
        ("API_TOKENS", "agent:secret,admin:other"),
    ]);
    for call in ["CA1", "CA2"] {
        router.allocate(call);
    }
    let mut check = python("tests/checkers/router_client.py");
    check.env("SMART_ROUTER_URL", format!("http://{}", router.address));
    check.envs([("SMART_ROUTER_TOKEN", "secret"), ("POD_NAME", "agent-0"), ("CALLS", "CA1,CA2")]);
    run_external_check(&mut check);
}
