//! The resources of the fake API server.

/// A resource that the server stores.
pub(super) struct Resource {
    /// `/api/v1`, or `/apis/` with group and version.
    pub(super) prefix: &'static str,
    pub(super) plural: &'static str,
    pub(super) kind: &'static str,
    pub(super) is_namespaced: bool,
    /// Served only after [`super::FakeKube::install_crds`].
    pub(super) is_custom: bool,
}

const CORE: &str = "/api/v1";
const CUSTOM: &str = "/apis/voice.smart-router.io/v1alpha1";

const fn namespaced(prefix: &'static str, plural: &'static str, kind: &'static str) -> Resource {
    Resource { prefix, plural, kind, is_namespaced: true, is_custom: false }
}

const fn custom(plural: &'static str, kind: &'static str) -> Resource {
    Resource { is_custom: true, ..namespaced(CUSTOM, plural, kind) }
}

static RESOURCES: [Resource; 9] = [
    namespaced(CORE, "pods", "Pod"),
    Resource { is_namespaced: false, ..namespaced(CORE, "nodes", "Node") },
    namespaced("/apis/coordination.k8s.io/v1", "leases", "Lease"),
    namespaced("/apis/events.k8s.io/v1", "events", "Event"),
    namespaced("/apis/apps/v1", "deployments", "Deployment"),
    namespaced("/apis/apps/v1", "statefulsets", "StatefulSet"),
    namespaced("/apis/autoscaling/v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler"),
    custom("voicetiers", "VoiceTier"),
    custom("voicemerchants", "VoiceMerchant"),
];

impl Resource {
    /// The `apiVersion` of its objects.
    pub(super) fn api_version(&self) -> &'static str {
        self.prefix.trim_start_matches("/apis/").trim_start_matches("/api/")
    }

    pub(super) fn group(&self) -> &'static str {
        self.api_version().rsplit_once('/').map_or("", |(group, _)| group)
    }

    pub(super) fn find(plural: &str) -> &'static Self {
        RESOURCES.iter().find(|known| known.plural == plural).expect("a known resource")
    }
}

/// The target of a request.
pub(super) struct Target<'a> {
    pub(super) resource: &'static Resource,
    /// Empty for a resource of the cluster, and for all namespaces.
    pub(super) namespace: &'a str,
    /// Empty for the collection.
    pub(super) name: &'a str,
    pub(super) is_status: bool,
    pub(super) is_scale: bool,
}

impl<'a> Target<'a> {
    /// Returns the target of a path; `None` if the server has no such resource.
    pub(super) fn parse(path: &'a str) -> Option<Self> {
        RESOURCES.iter().find_map(|resource| {
            let rest = path.strip_prefix(resource.prefix)?.strip_prefix('/')?;
            let (namespace, rest) = match rest.strip_prefix("namespaces/") {
                Some(rest) if resource.is_namespaced => rest.split_once('/')?,
                _ => ("", rest),
            };
            let mut parts = rest.split('/');
            let is_it = parts.next() == Some(resource.plural);
            let (name, subresource) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
            let is_status = subresource == "status";
            let is_scale = subresource == "scale" && resource.prefix == "/apis/apps/v1";
            let is_known = subresource.is_empty() || is_status || is_scale;
            let is_valid = is_it && parts.next().is_none() && is_known;
            is_valid.then_some(Self { resource, namespace, name, is_status, is_scale })
        })
    }
}
