//! Calls of many providers at once, and checks of their frames and of the store.

use std::net::SocketAddr;

use fleet::tiers::{DocumentSource, Tiers};
use smart_router::tools::provider_stream::{Dialer, Echoes, MediaFormat, ProviderStream};
use telephony::Provider as Dialect;
use testkit::{Router, echo_agent::EchoAgent, snapshot::Snapshot};

use super::path_of;

/// Opens the stream of a call at a gateway, which may differ from the host of its URL.
pub(super) async fn open_conversation(
    gateway: SocketAddr,
    url: &str,
    dialect: Dialect,
    call: &str,
) -> Result<ProviderStream, String> {
    let url = format!("ws://{gateway}{}", path_of(url));
    let open = async {
        let connection = Dialer::default().connect(&url).await?;
        ProviderStream::open(connection, &url, MediaFormat::from(dialect), call).await
    };
    open.await.map_err(|error| format!("not opened: {error}"))
}

/// Frames of the call came back in order, at most once, and no others.
pub(super) fn check_intact(echoes: &Echoes) -> Result<(), String> {
    let misplaced = [echoes.foreign, echoes.out_of_order, echoes.duplicated, echoes.unmarked];
    match misplaced == [0; 4] {
        true => Ok(()),
        false => Err(format!("frames out of place: {echoes:?}")),
    }
}

/// The static invariants hold in Redis: one call per exclusive pod (I1), one pod per call (I2),
/// indexes that follow from the facts (I3, I11, I13), streams of live calls only (I12).
pub(super) fn expect_invariants(redis: &mut redis::Connection, pods: usize) {
    let tiers = format!(r#"{{"gold": {pods}}}"#);
    let tiers = Tiers::parse(&tiers, DocumentSource::Settings).unwrap().0;
    let state = Snapshot::read(redis, "voice:").unwrap().state("voice:", &tiers).unwrap();
    let mut violations = state.violations();
    violations.extend(state.overloads());
    let messages: Vec<String> =
        violations.into_iter().map(|it| format!("{}: {}", it.invariant, it.message)).collect();
    assert_eq!(messages, Vec::<String>::new());
}

/// Agents in this process, one per exclusive pod.
pub(super) struct EchoPods(pub Vec<EchoAgent>);

impl EchoPods {
    pub(super) async fn start(count: usize) -> Self {
        let mut agents = Vec::new();
        for _ in 0..count {
            agents.push(EchoAgent::start().await);
        }
        Self(agents)
    }

    /// Starts a router for these pods.
    pub(super) fn router(&self, settings: &[(&str, &str)]) -> Router {
        let pods = self.0.iter().enumerate();
        let pods: Vec<String> =
            pods.map(|(number, agent)| format!("agent-{number}={}", agent.address)).collect();
        let (pods, tiers) = (pods.join(","), format!(r#"{{"gold": {}}}"#, self.0.len()));
        let mut all = vec![("PODS", pods.as_str()), ("TIER_CONFIG", &tiers)];
        all.extend(settings);
        Router::start(&all)
    }

    /// No pod had two streams at once, a stream of another call, or audio before its opening.
    pub(super) fn assert_no_violations(&self) {
        let violations = self.0.iter().flat_map(|agent| agent.log().violations.clone());
        assert_eq!(violations.collect::<Vec<_>>(), Vec::<String>::new());
    }
}
