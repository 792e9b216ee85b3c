//! The pods of a test call: which of them have failed, and which one serves it.

use hyper::StatusCode;
use serde_json::Value;

use super::{call::print_line, router_client::no_answer};
use crate::client::Client;

/// The pod of a call, as far as it was printed.
pub(super) struct CallPods {
    pub(super) pod: String,
    pub(super) pool: String,
    /// Failures that were printed.
    failures: usize,
}

impl CallPods {
    pub(super) fn new(pod: String, pool: String) -> Self {
        Self { pod, pool, failures: 0 }
    }

    /// Reads the call, and prints what has changed since.
    pub(super) async fn refresh(&mut self, client: &Client, call_sid: &str) -> anyhow::Result<()> {
        let (status, call) = read_call(client, call_sid).await?;
        if status == StatusCode::OK { self.follow(&call) } else { Ok(()) }
    }

    /// Prints the failures of a call that is not connected.
    pub(super) async fn refresh_failures(
        &mut self,
        client: &Client,
        call_sid: &str,
    ) -> anyhow::Result<()> {
        let (_, call) = read_call(client, call_sid).await?;
        self.print_failures(events(&call))
    }

    /// Prints the pods that have failed since, and the pod that serves the call instead. `call` is
    /// the response to a request for the call, which may have ended.
    pub(super) fn follow(&mut self, call: &Value) -> anyhow::Result<()> {
        let events = events(call);
        self.print_failures(events)?;
        let served = ["attached", "failed_over"];
        let last = events.iter().rfind(|event| served.iter().any(|kind| event["event"] == *kind));
        let (pod, pool) = match call["pod_name"].as_str() {
            Some(pod) => (Some(pod), &call["source_pool"]),
            None => (last.and_then(|it| it["pod_name"].as_str()), last.map_or(&Value::Null, pool)),
        };
        if let Some(pod) = pod.filter(|pod| *pod != self.pod) {
            self.pod = pod.to_owned();
            self.pool = pool.as_str().unwrap_or(&self.pool).to_owned();
            print_line(&format!("   {} from {} serves the call", self.pod, self.pool))?;
        }
        Ok(())
    }

    fn print_failures(&mut self, events: &[Value]) -> anyhow::Result<()> {
        let failures = events.iter().filter(|event| event["event"] == "pod_failed");
        for failure in failures.skip(self.failures) {
            let text = |field: &str| failure[field].as_str().unwrap_or_default();
            print_line(&format!("   {} failed: {}", text("pod_name"), text("detail")))?;
            self.failures += 1;
        }
        Ok(())
    }
}

fn pool(event: &Value) -> &Value {
    &event["pool"]
}

pub(super) async fn read_call(
    client: &Client,
    call_sid: &str,
) -> anyhow::Result<(StatusCode, Value)> {
    Ok(client.get(&format!("/api/v1/calls/{call_sid}")).await.map_err(no_answer)?)
}

/// The events of a live or an ended call, the oldest first.
fn events(call: &Value) -> &[Value] {
    let events = call["events"].as_array().or_else(|| call["details"]["events"].as_array());
    events.map_or(&[], Vec::as_slice)
}
