//! Settings of the cluster and of the leader election.

use super::{Config, ConfigError, Settings, duration_or_off};
use crate::{cluster::ClusterConfig, cluster::LeaderConfig};

/// Limit of watched namespaces: each has a watch of its own in every replica.
const MAX_NAMESPACES: usize = 50;

pub(super) fn cluster(settings: &Settings) -> Result<ClusterConfig, ConfigError> {
    let s = &settings.cluster;
    Ok(ClusterConfig {
        namespace: s.namespace.clone(),
        namespaces: namespaces(settings)?,
        selector: s.pod_label_selector.clone(),
        agent_container: s.agent_container.clone(),
        agent_port: settings.streams.voice_agent_port,
        settle_time: s.pod_settle_time.0,
        has_manifests: s.manifests,
    })
}

/// Returns the namespaces whose pods are watched.
fn namespaces(settings: &Settings) -> Result<Vec<String>, ConfigError> {
    let Some(text) = settings.cluster.namespaces.as_deref().filter(|text| !text.is_empty()) else {
        return Ok(vec![settings.cluster.namespace.clone()]);
    };
    let fail = |expected: String| Err(ConfigError::new("NAMESPACES", text, expected));
    let mut names: Vec<String> = Vec::new();
    for name in text.split(',').map(str::trim) {
        if !is_namespace(name) {
            return fail(format!("names of namespaces, separated by commas; {name:?} is not one"));
        }
        if names.iter().any(|known| known == name) {
            return fail(format!("each namespace once; {name} is named twice"));
        }
        names.push(name.to_owned());
    }
    if names.len() > MAX_NAMESPACES {
        return fail(format!("at most {MAX_NAMESPACES} namespaces"));
    }
    Ok(names)
}

/// Whether the text is an RFC 1123 label.
fn is_namespace(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=63).contains(&text.len())
        && text.bytes().all(is_allowed)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

pub(super) fn leader(settings: &Settings, in_cluster: bool) -> Result<LeaderConfig, ConfigError> {
    let (duration, deadline, retry) = (
        settings.leader.leader_election_duration,
        settings.leader.leader_election_renew_deadline,
        settings.leader.leader_election_retry_period,
    );
    if deadline >= duration {
        return Err(ConfigError::new(
            "LEADER_ELECTION_RENEW_DEADLINE",
            deadline,
            format!("less than LEADER_ELECTION_DURATION, which is {duration}"),
        ));
    }
    if retry >= deadline {
        return Err(ConfigError::new(
            "LEADER_ELECTION_RETRY_PERIOD",
            retry,
            format!("less than LEADER_ELECTION_RENEW_DEADLINE, which is {deadline}"),
        ));
    }
    let namespace =
        settings.leader.leader_election_namespace.as_ref().unwrap_or(&settings.cluster.namespace);
    Ok(LeaderConfig {
        enabled: settings.leader.leader_election_enabled.unwrap_or(in_cluster),
        namespace: namespace.clone(),
        lock_name: settings.leader.leader_election_lock_name.clone(),
        duration: duration.0,
        renew_deadline: deadline.0,
        retry_period: retry.0,
    })
}

pub(super) fn describe(settings: &Settings) -> [(&'static str, String); 6] {
    let s = &settings.cluster;
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    [
        ("NAMESPACE", s.namespace.clone()),
        ("NAMESPACES", text(&s.namespaces)),
        ("POD_LABEL_SELECTOR", s.pod_label_selector.clone()),
        ("AGENT_CONTAINER", text(&s.agent_container)),
        ("POD_SETTLE_TIME", duration_or_off(s.pod_settle_time)),
        ("MANIFESTS", if s.manifests { "on" } else { "off" }.into()),
    ]
}

pub(super) fn describe_leader(config: &Config) -> [(&'static str, String); 6] {
    let s = &config.settings.leader;
    [
        ("LEADER_ELECTION_ENABLED", config.leader.enabled.to_string()),
        ("LEADER_ELECTION_NAMESPACE", config.leader.namespace.clone()),
        ("LEADER_ELECTION_LOCK_NAME", s.leader_election_lock_name.clone()),
        ("LEADER_ELECTION_DURATION", s.leader_election_duration.to_string()),
        ("LEADER_ELECTION_RENEW_DEADLINE", s.leader_election_renew_deadline.to_string()),
        ("LEADER_ELECTION_RETRY_PERIOD", s.leader_election_retry_period.to_string()),
    ]
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        settings: Settings,
    }

    fn names(value: &str) -> Result<Vec<String>, String> {
        let namespaces_flag = format!("--namespaces={value}");
        let args = ["smart-router", "--namespace=voice", &namespaces_flag];
        let settings = Program::parse_from(args).settings;
        namespaces(&settings).map_err(|error| error.to_string())
    }

    #[test]
    fn namespaces_are_a_list_of_names() {
        assert_eq!(names("").unwrap(), ["voice"], "the router's own");
        assert_eq!(names("a, b").unwrap(), ["a", "b"]);
        for (bad, word) in
            [("a,,b", "\"\""), ("a,B", "\"B\""), ("a,a", "named twice"), ("-a", "\"-a\"")]
        {
            let error = names(bad).unwrap_err();
            assert!(error.contains("NAMESPACES") && error.contains(word), "{bad}: {error}");
        }
    }
}
