//! The Lease that makes one replica the leader. Clocks of replicas may differ: a Lease has
//! expired when it has not changed for its duration by the local clock.

use std::time::{Duration, Instant};

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{Api, Error, api::PostParams};

/// Outcome of a renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Renewal {
    Done,
    Lost,
    /// The Lease changed between the read and the write; this replica may still hold it.
    Conflict,
}

pub(crate) struct Lock {
    leases: Api<Lease>,
    name: String,
    identity: String,
    duration: Duration,
    /// The last seen version of the Lease, and when it was first seen.
    seen: Option<(String, Instant)>,
    /// Its holder at that version.
    pub(crate) holder: String,
}

impl Lock {
    pub(crate) fn new(
        leases: Api<Lease>,
        name: String,
        identity: String,
        duration: Duration,
    ) -> Self {
        Self { leases, name, identity, duration, seen: None, holder: String::new() }
    }

    /// Returns when the Lease last changed, by the local clock: its holder was alive then.
    pub(crate) fn changed_at(&self) -> Option<Instant> {
        self.seen.as_ref().map(|(_, since)| *since)
    }

    /// Tries once to acquire the Lease; returns the epoch of the new term, which is above
    /// `floor` and above all previous terms.
    pub(crate) async fn acquire(&mut self, floor: u64) -> Result<Option<u64>, Error> {
        let Some(lease) = self.leases.get_opt(&self.name).await? else {
            let fresh = Lease {
                metadata: ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() },
                spec: Some(self.spec(floor + 1)),
            };
            let written = self.leases.create(&PostParams::default(), &fresh).await;
            return Ok(self.written(written)?.then_some(floor + 1));
        };
        let version = lease.metadata.resource_version.clone().unwrap_or_default();
        let now = Instant::now();
        let since = match &self.seen {
            Some((seen, since)) if *seen == version => *since,
            _ => now,
        };
        self.seen = Some((version, since));
        let before = lease.spec.clone().unwrap_or_default();
        self.holder = before.holder_identity.clone().unwrap_or_default();
        let duration = before
            .lease_duration_seconds
            .and_then(|seconds| u64::try_from(seconds).ok())
            .map_or(self.duration, Duration::from_secs);
        let is_free = self.holder.is_empty() || self.holder == self.identity;
        if !is_free && now < since + duration {
            return Ok(None);
        }
        let terms =
            before.lease_transitions.and_then(|terms| u64::try_from(terms).ok()).unwrap_or(0);
        let epoch = terms.max(floor) + 1;
        let spec = self.spec(epoch);
        Ok(self.write(lease, spec).await?.then_some(epoch))
    }

    /// Renews the Lease of the current term. A deleted Lease is lost: the next one begins a new
    /// term.
    pub(crate) async fn renew(&mut self) -> Result<Renewal, Error> {
        let Some(lease) = self.leases.get_opt(&self.name).await? else {
            return Ok(Renewal::Lost);
        };
        let before = lease.spec.clone().unwrap_or_default();
        self.holder = before.holder_identity.clone().unwrap_or_default();
        if self.holder != self.identity {
            return Ok(Renewal::Lost);
        }
        let now = MicroTime(Timestamp::now());
        let spec =
            LeaseSpec { renew_time: Some(now), lease_duration_seconds: self.seconds(), ..before };
        Ok(match self.write(lease, spec).await? {
            true => Renewal::Done,
            false => Renewal::Conflict,
        })
    }

    /// Releases the Lease, so that another replica need not wait for its expiry.
    pub(crate) async fn release(&mut self) -> Result<(), Error> {
        let Some(lease) = self.leases.get_opt(&self.name).await? else { return Ok(()) };
        let before = lease.spec.clone().unwrap_or_default();
        if before.holder_identity.as_deref() != Some(&self.identity) {
            return Ok(());
        }
        let spec = LeaseSpec {
            holder_identity: Some(String::new()),
            lease_duration_seconds: Some(1),
            ..before
        };
        self.write(lease, spec).await.map(drop)
    }

    fn spec(&self, epoch: u64) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: self.seconds(),
            acquire_time: Some(now.clone()),
            renew_time: Some(now),
            // Above the range of this field, only the store counts the epoch.
            lease_transitions: Some(i32::try_from(epoch).unwrap_or(i32::MAX)),
            ..LeaseSpec::default()
        }
    }

    /// The duration in seconds, rounded up.
    fn seconds(&self) -> Option<i32> {
        i32::try_from(self.duration.as_millis().div_ceil(1_000).max(1)).ok()
    }

    /// Replaces the version that was read (optimistic concurrency); returns false on a conflict.
    async fn write(&mut self, lease: Lease, spec: LeaseSpec) -> Result<bool, Error> {
        let changed = Lease { metadata: lease.metadata, spec: Some(spec) };
        let written = self.leases.replace(&self.name, &PostParams::default(), &changed).await;
        self.written(written)
    }

    fn written(&mut self, written: Result<Lease, Error>) -> Result<bool, Error> {
        match written {
            Ok(lease) => {
                let version = lease.metadata.resource_version.unwrap_or_default();
                self.seen = Some((version, Instant::now()));
                self.holder.clone_from(&self.identity);
                Ok(true)
            }
            Err(Error::Api(status)) if status.code == 409 => Ok(false),
            Err(error) => Err(error),
        }
    }
}
