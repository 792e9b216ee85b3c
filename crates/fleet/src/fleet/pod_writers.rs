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
    /// The pods of a namespace. It is empty in a store that a leader of an earlier version wrote.
    Kubernetes { namespace: String },
}

impl PodOrigin {
    /// Whether pods of this origin may be written where `owner` has written before.
    pub(super) fn may_follow(&self, owner: &Self) -> bool {
        let is_cluster = matches!(self, Self::Kubernetes { .. });
        self == owner || is_cluster && *owner == Self::Kubernetes { namespace: String::new() }
    }
}

impl fmt::Display for PodOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Simulated => f.write_str("simulated"),
            Self::List => f.write_str("list"),
            Self::Kubernetes { namespace } if namespace.is_empty() => f.write_str("kubernetes"),
            Self::Kubernetes { namespace } => write!(f, "kubernetes/{namespace}"),
        }
    }
}

impl FromStr for PodOrigin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('/') {
            Some(("kubernetes", namespace)) => Ok(Self::Kubernetes { namespace: namespace.into() }),
            None if text == "kubernetes" => Ok(Self::Kubernetes { namespace: String::new() }),
            None if text == "simulated" => Ok(Self::Simulated),
            None if text == "list" => Ok(Self::List),
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
    Foreign { owner: PodOrigin },
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

/// The list of pods in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PodList {
    pub digest: String,
    /// When a replica last followed it. It is no fact: a restart counts as following.
    pub followed_at: Millis,
}

impl Fleet {
    /// The origin of the pods in the store. A store with an epoch and without an origin was
    /// written by a leader of an earlier version.
    pub(super) fn owner(&self) -> Option<PodOrigin> {
        let earlier = || PodOrigin::Kubernetes { namespace: String::new() };
        self.origin.clone().or_else(|| (self.epoch > 0).then(earlier))
    }

    /// Refuses another origin and a smaller epoch; adopts a first origin and a larger epoch.
    pub(super) fn fence(&mut self, writer: PodWriter<'_>) -> Result<(), WriteRefused> {
        let PodWriter { origin, epoch } = writer;
        if let Some(owner) = self.owner().filter(|owner| !origin.may_follow(owner)) {
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
        let foreign = self.owner().filter(|owner| !origin.may_follow(owner));
        if let Some(owner) = foreign {
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
