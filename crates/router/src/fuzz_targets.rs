//! The parsers and verifiers that the targets in `fuzz/` call; no other crate uses them.

pub use crate::{
    auth::Tokens,
    client_limits::RateLimiter,
    cluster::{ClusterConfig, ClusterPod, PodObject},
    control::pod_list::parse as parse_pod_list,
    tools::agent::{Reaction, react},
};
