//! Fencing: which source of pods may write them. A store has one origin of pods, and within it
//! the writer with the highest epoch.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::{Change, Fleet};
use crate::Millis;

/// Where the pods of a store come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum PodOrigin {
    /// Agents inside of the routers.
    Simulated,
    /// A static list: `PODS` or `PODS_FILE`.
    List,
    /// The pods of a namespace of a cluster. Both, or the cluster alone, are empty in a store that
    /// an earlier version wrote. A router whose cluster is not identified yet has no cluster.
    Kubernetes {
        namespace: String,
        /// The UID of the namespace: other clusters may have one of the same name.
        cluster: String,
    },
    /// Of pods that were written by an earlier version, without a leader. No router has it.
    Unknown,
}

impl PodOrigin {
    /// Whether pods of this origin may be written where `owner` has written before.
    pub(super) fn may_follow(&self, owner: &Self) -> bool {
        match (self, owner) {
            // Simulated agents must not replace pods that may be real.
            (_, Self::Unknown) => *self != Self::Simulated,
            // The first cluster that comes has the pods that an earlier version wrote.
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
            _ => Err(format!("no origin of pods: {text:?}")),
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

/// A source of pods that writes, and the fencing epoch under which it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodWriter<'a> {
    pub origin: &'a PodOrigin,
    pub epoch: u64,
}

/// Why a write of pods was refused; nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WriteRefused {
    /// A newer leader, or a newer list of pods, has begun to write.
    #[error("epoch {epoch} was replaced by {current}")]
    Fenced { epoch: u64, current: u64 },
    /// The store holds pods of another origin.
    #[error("the store holds the pods of another origin: {owner}")]
    Foreign {
        /// As the store has it: a newer version may have recorded an origin that this one
        /// does not know.
        owner: String,
    },
}

/// A source of pods asks to write them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    pub origin: PodOrigin,
    pub by: Claimant,
    /// Takes the store over from another origin.
    pub force: bool,
}

/// What entitles a source to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claimant {
    /// A leader, with the epoch of its Lease; `None` asks for the epoch in force.
    Leader { epoch: Option<u64> },
    /// One of several replicas with the same list of pods, which `digest` stands for.
    List {
        digest: String,
        /// The list was just read: it replaces another one.
        is_new: bool,
    },
}

/// Why a claim was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimRefused {
    #[error(transparent)]
    Write(#[from] WriteRefused),
    /// Another replica follows a newer list of pods.
    #[error("another replica follows a newer list of pods")]
    Superseded,
}

/// How long a list of pods stays in force without a replica that follows it.
pub const LIST_TTL: Millis = 30_000;

/// The digest that stands for simulated agents: they follow the tiers, which all replicas share.
pub const SIMULATED: &str = "simulated";

/// The list of pods in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PodList {
    pub digest: String,
    /// When a replica last followed it. It is no fact: a restart counts as following.
    pub followed_at: Millis,
}

impl Fleet {
    /// The origin of the pods in the store. One that was lost follows from the list in force. A
    /// store with an epoch and without both was written by a leader of an earlier version.
    pub(super) fn owner(&self) -> Option<PodOrigin> {
        let lost = || match &self.list {
            Some(list) if list.digest == SIMULATED => Some(PodOrigin::Simulated),
            Some(_) => Some(PodOrigin::List),
            None if self.epoch > 0 => {
                Some(PodOrigin::Kubernetes { namespace: String::new(), cluster: String::new() })
            }
            None => (!self.pods.is_empty()).then_some(PodOrigin::Unknown),
        };
        self.origin.clone().or_else(lost)
    }

    /// The origin that keeps pods of `origin` from being written.
    fn foreign(&self, origin: &PodOrigin) -> Option<String> {
        Some(self.owner().filter(|owner| !origin.may_follow(owner))?.to_string())
    }

    /// Refuses another origin and a smaller epoch; adopts a first origin and a larger epoch.
    pub(super) fn fence(&mut self, writer: PodWriter<'_>) -> Result<(), WriteRefused> {
        let PodWriter { origin, epoch } = writer;
        if let Some(owner) = self.foreign(origin) {
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

    /// Claims the pods of the store; the epoch under which they may be written.
    pub fn claim_pods(&mut self, claim: &Claim, now: Millis) -> Result<u64, ClaimRefused> {
        let origin = &claim.origin;
        if let Some(owner) = self.foreign(origin) {
            if !claim.force {
                return Err(WriteRefused::Foreign { owner }.into());
            }
            // The epoch rises, so that the origin before is fenced off.
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
            // A clock that was set back must not keep an abandoned list in force.
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
