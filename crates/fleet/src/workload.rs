//! Workloads: the Deployments and StatefulSets that run the pods of a tier.

use std::{fmt, str::FromStr};

/// Maximum length of the name of a workload, which is a DNS subdomain.
const MAX_NAME: usize = 253;

/// The kind of a workload: it decides which pods a lower number of replicas removes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WorkloadKind {
    /// Removes pods that are not ready first, then by their deletion cost.
    Deployment,
    /// Removes the pods with the highest ordinals.
    StatefulSet,
}

impl WorkloadKind {
    const ALL: [Self; 2] = [Self::Deployment, Self::StatefulSet];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Deployment => "deployment",
            Self::StatefulSet => "statefulset",
        }
    }
}

/// A workload of the cluster: `deployment/voice-agent-gold`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Workload {
    pub kind: WorkloadKind,
    pub name: String,
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind.as_str(), self.name)
    }
}

impl FromStr for Workload {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = "expected \"deployment/NAME\" or \"statefulset/NAME\"";
        let (kind, name) = text.split_once('/').ok_or(expected)?;
        let kind = WorkloadKind::ALL.into_iter().find(|known| known.as_str() == kind);
        let kind = kind.ok_or(expected)?;
        if !is_subdomain(name) {
            return Err(format!("{name:?} is not the name of a Kubernetes object"));
        }
        Ok(Self { kind, name: name.to_owned() })
    }
}

/// Whether Kubernetes accepts the name: a DNS subdomain.
fn is_subdomain(name: &str) -> bool {
    let is_label = |label: &str| {
        let is_edge = |byte: Option<u8>| byte.is_some_and(|byte| byte != b'-');
        let is_part = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let mut bytes = label.bytes();
        label.bytes().all(is_part) && is_edge(bytes.next()) && is_edge(label.bytes().last())
    };
    name.len() <= MAX_NAME && name.split('.').all(is_label)
}

/// The ordinal of a pod of a StatefulSet: the number after the last hyphen of its name. Other
/// names have none.
pub fn ordinal(name: &str) -> Option<u32> {
    let (_, digits) = name.rsplit_once('-')?;
    let is_number = (1..=9).contains(&digits.len()) && digits.bytes().all(|it| it.is_ascii_digit());
    is_number.then(|| digits.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workload_is_a_known_kind_and_a_name_of_kubernetes() {
        for text in ["deployment/voice-agent-gold", "statefulset/a", "deployment/v1.agent"] {
            assert_eq!(text.parse::<Workload>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "voice-agent",
            "deployment/",
            "deployment/a/b",
            "daemonset/a",
            "Deployment/a",
            "deployment/A",
            "deployment/-a",
            "deployment/a-",
            "deployment/a..b",
            "deployment/a b",
            "deployment/a=b",
            &format!("deployment/{}", "a".repeat(254)),
        ] {
            assert!(text.parse::<Workload>().is_err(), "{text}");
        }
    }

    #[test]
    fn an_ordinal_is_the_number_after_the_last_hyphen() {
        assert_eq!(ordinal("voice-agent-12"), Some(12));
        assert_eq!(ordinal("agent-0"), Some(0));
        assert_eq!(ordinal("agent-007"), Some(7));
        for name in ["agent", "agent7", "agent-", "agent-x7", "agent-1234567890", "7"] {
            assert_eq!(ordinal(name), None, "{name}");
        }
    }
}
