//! Lists of pods by name and address, for use without a cluster.

use aws_lc_rs::digest::{Context, SHA256};
use data_encoding::HEXLOWER;

use fleet::{PodFacts, names::PodName};

/// A pod of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedPod {
    pub name: PodName,
    /// `host:port` of the agent's own server.
    pub address: String,
}

impl ListedPod {
    /// Returns the pod's facts. A listed pod is always ready, and its address is its UID, so that
    /// its calls survive a restart of the router.
    pub(crate) fn facts(&self) -> PodFacts {
        PodFacts {
            uid: self.address.clone(),
            address: self.address.clone(),
            ready: true,
            terminating: false,
            at_risk: false,
            restarts: 0,
            pin: None,
        }
    }
}

/// Returns a hash that identifies a list; its pods are sorted by name.
pub(super) fn digest(pods: &[ListedPod]) -> String {
    let mut context = Context::new(&SHA256);
    for pod in pods {
        context.update(format!("{}={}\n", pod.name, pod.address).as_bytes());
    }
    HEXLOWER.encode(&context.finish().as_ref()[..16])
}

/// Parses `name=host:port` entries, separated by commas or lines. A missing port is `agent_port`;
/// `#` begins a comment.
pub fn parse(text: &str, agent_port: u16) -> Result<Vec<ListedPod>, String> {
    let mut pods: Vec<ListedPod> = Vec::new();
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default());
    let entries = lines.flat_map(|line| line.split(',')).map(str::trim);
    for entry in entries.filter(|entry| !entry.is_empty()) {
        let (name, address) = entry
            .split_once('=')
            .ok_or_else(|| format!("name=host:port entries; {entry:?} is not one"))?;
        let name: PodName =
            name.trim().parse().map_err(|error| format!("name=host:port entries; {error}"))?;
        let address = parse_address(address.trim(), agent_port)
            .ok_or_else(|| format!("name=host:port entries; {entry:?} has no valid address"))?;
        pods.push(ListedPod { name, address });
    }
    pods.sort_by(|a, b| a.name.cmp(&b.name));
    match pods.windows(2).find(|pair| pair[0].name == pair[1].name) {
        Some(pair) => Err(format!("each pod once; {} is listed twice", pair[0].name)),
        None if pods.is_empty() => Err("at least one name=host:port entry".into()),
        None => Ok(pods),
    }
}

fn parse_address(text: &str, agent_port: u16) -> Option<String> {
    let with_port = match text.rsplit_once(':') {
        Some((host, port)) if !host.ends_with(':') && port.parse::<u16>().is_ok() => {
            text.to_owned()
        }
        Some(_) => return None,
        None => format!("{text}:{agent_port}"),
    };
    let authority: hyper::http::uri::Authority = with_port.parse().ok()?;
    let is_valid =
        !authority.host().is_empty() && authority.port_u16().is_some() && !with_port.contains('@');
    is_valid.then_some(with_port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_parsed_from_one_line_or_several() {
        let pods = parse("b=10.0.0.2:9000, a=host\n# none\n\nc=[::1]:8000 # last\n", 8000).unwrap();
        let shown: Vec<_> =
            pods.iter().map(|pod| format!("{}={}", pod.name, pod.address)).collect();
        assert_eq!(shown, ["a=host:8000", "b=10.0.0.2:9000", "c=[::1]:8000"]);
    }

    #[test]
    fn bad_lists_are_refused() {
        for bad in [
            "",
            "a",
            "a=",
            "A=h:1",
            "a=h:1,a=h:2",
            "a=h:x",
            "a=h:99999",
            "metadata=h:1",
            "a=x@h:1",
            "a=h/p:1",
        ] {
            assert!(parse(bad, 8000).is_err(), "{bad}");
        }
    }
}
