//! Fencing of pod writes: a store accepts pods of one origin, and within it only the highest
//! epoch.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::{Change, Fleet};
use crate::{Millis, rules::LIST_TTL};

/// The origin of the pods in a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum PodOrigin {
    /// Simulated agents inside the routers.
    Simulated,
    /// A static list: `PODS` or `PODS_FILE`.
    List,
    /// The pods of a namespace in a Kubernetes cluster. Both fields, or `cluster` alone, are empty
    /// in a store written by an earlier version. `cluster` is empty in a router that has not
    /// identified its cluster yet.
    Kubernetes {
        namespace: String,
        /// The UID of the namespace: other clusters may have a namespace of the same name.
        cluster: String,
    },
    /// Pods written by an earlier version without a leader. No router has this origin.
    Unknown,
}

impl PodOrigin {
    /// Whether pods of this origin may be written to a store of `owner`.
    pub(super) fn may_follow(&self, owner: &Self) -> bool {
        match (self, owner) {
            // Simulated agents must not replace possibly real pods.
            (_, Self::Unknown) => *self != Self::Simulated,
            // The first cluster to write takes over the pods of an earlier version.
            (Self::Kubernetes { namespace: ours, .. }, Self::Kubernetes { namespace, cluster })
                if cluster.is_empty() =>
            {
                namespace.is_empty() || namespace == ours
            }
            _ => self == owner,
        }
    }
}

impl fmt::Display for PodOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Simulated => f.write_str("simulated"),
            Self::List => f.write_str("list"),
            Self::Kubernetes { namespace, cluster } => {
                f.write_str("kubernetes")?;
                let parts = [namespace, cluster].into_iter().filter(|part| !part.is_empty());
                parts.into_iter().try_for_each(|part| write!(f, "/{part}"))
            }
            Self::Unknown => f.write_str("unknown"),
        }
    }
}

impl FromStr for PodOrigin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, rest) = text.split_once('/').unwrap_or((text, ""));
        match kind {
            "kubernetes" => {
                let (namespace, cluster) = rest.split_once('/').unwrap_or((rest, ""));
                Ok(Self::Kubernetes { namespace: namespace.into(), cluster: cluster.into() })
            }
            "simulated" if text == kind => Ok(Self::Simulated),
            "list" if text == kind => Ok(Self::List),
            _ => Err(format!("unknown pod origin {text:?}")),
        }
    }
}

impl TryFrom<String> for PodOrigin {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<PodOrigin> for String {
    fn from(origin: PodOrigin) -> Self {
        origin.to_string()
    }
}

/// A writer of pods: its origin and its fencing epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodWriter<'a> {
    pub origin: &'a PodOrigin,
    pub epoch: u64,
}

/// The reason why a write of pods was refused without effect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WriteRefused {
    /// A newer leader or a newer list of pods has taken over.
    #[error("epoch {epoch} was replaced by {current}")]
    Fenced { epoch: u64, current: u64 },
    /// The store holds pods of another origin.
    #[error("the store holds the pods of another origin: {owner}")]
    Foreign {
        /// The text in the store: a newer version may have recorded an origin that this version
        /// cannot parse.
        owner: String,
    },
}

/// A request for the right to write pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    pub origin: PodOrigin,
    pub by: Claimant,
    /// Take the store over from another origin.
    pub force: bool,
}

/// The basis of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claimant {
    /// A leader with the epoch of its Lease; `None` queries the current epoch.
    Leader { epoch: Option<u64> },
    /// One of several replicas that follow the same list of pods, identified by its digest.
    List {
        digest: String,
        /// The list was just read, so it replaces another one.
        is_new: bool,
    },
}

/// The reason why a claim was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimRefused {
    #[error(transparent)]
    Write(#[from] WriteRefused),
    /// Another replica follows a newer list of pods.
    #[error("another replica follows a newer list of pods")]
    Superseded,
}

/// The digest of simulated agents: they follow the tier table, which all replicas share.
pub const SIMULATED_DIGEST: &str = "simulated";

/// The list of pods in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PodList {
    pub digest: String,
    /// Time of the last claim by a replica that follows it. Not a fact: repeated claims are not
    /// journaled.
    pub followed_at: Millis,
}

impl Fleet {
    /// The origin of the pods in the store. A missing origin is derived from the list in force. A
    /// store with an epoch but without origin and list was written by a leader of an earlier
    /// version.
    pub(super) fn owner(&self) -> Option<PodOrigin> {
        let derived = || match &self.list {
            Some(list) if list.digest == SIMULATED_DIGEST => Some(PodOrigin::Simulated),
            Some(_) => Some(PodOrigin::List),
            None if self.epoch > 0 => {
                Some(PodOrigin::Kubernetes { namespace: String::new(), cluster: String::new() })
            }
            None => (!self.pods.is_empty()).then_some(PodOrigin::Unknown),
        };
        self.origin.clone().or_else(derived)
    }

    /// The current origin, if it excludes writes of `origin`.
    fn conflicting_owner(&self, origin: &PodOrigin) -> Option<String> {
        Some(self.owner().filter(|owner| !origin.may_follow(owner))?.to_string())
    }

    /// Refuses another origin and a lower epoch; adopts a first origin and a higher epoch.
    pub(super) fn fence(&mut self, writer: PodWriter<'_>) -> Result<(), WriteRefused> {
        let PodWriter { origin, epoch } = writer;
        if let Some(owner) = self.conflicting_owner(origin) {
            return Err(WriteRefused::Foreign { owner });
        }
        if epoch < self.epoch {
            return Err(WriteRefused::Fenced { epoch, current: self.epoch });
        }
        self.adopt_writer(writer);
        Ok(())
    }

    fn adopt_writer(&mut self, PodWriter { origin, epoch }: PodWriter<'_>) {
        if self.origin.as_ref() != Some(origin) {
            self.record(Change::Origin { origin: origin.clone() });
        }
        if epoch > self.epoch {
            self.record(Change::Epoch { epoch });
        }
    }

    /// Claims the right to write pods. Returns the epoch for the writes.
    pub fn claim_pods(&mut self, claim: &Claim, now: Millis) -> Result<u64, ClaimRefused> {
        let origin = &claim.origin;
        if let Some(owner) = self.conflicting_owner(origin) {
            if !claim.force {
                return Err(WriteRefused::Foreign { owner }.into());
            }
            // The higher epoch fences the previous origin.
            let epoch = self.epoch + 1;
            self.adopt_writer(PodWriter { origin, epoch });
        }
        match &claim.by {
            Claimant::Leader { epoch: None } => {}
            Claimant::Leader { epoch: Some(epoch) } => {
                self.fence(PodWriter { origin, epoch: *epoch })?;
            }
            Claimant::List { digest, is_new } => self.claim_list(origin, digest, *is_new, now)?,
        }
        Ok(self.epoch)
    }

    fn claim_list(
        &mut self,
        origin: &PodOrigin,
        digest: &str,
        is_new: bool,
        now: Millis,
    ) -> Result<(), ClaimRefused> {
        let mut epoch = self.epoch;
        if let Some(list) = self.list.as_mut().filter(|list| list.digest != digest) {
            // After a clock step backwards, an abandoned list must still expire.
            list.followed_at = list.followed_at.min(now);
            if !is_new && now < list.followed_at + LIST_TTL {
                return Err(ClaimRefused::Superseded);
            }
            epoch += 1;
        }
        self.adopt_writer(PodWriter { origin, epoch });
        if self.list.as_ref().is_none_or(|list| list.digest != digest) {
            self.record(Change::List { digest: digest.to_owned(), at: now });
        }
        if let Some(list) = &mut self.list {
            list.followed_at = now;
        }
        Ok(())
    }
}
