//! The Lease that makes one replica the leader. Clocks of replicas may differ: a
//! lease has run out when it has not changed for its duration by our own clock.

use std::time::{Duration, Instant};

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{Api, Error, api::PostParams};

/// What became of a renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewal {
    Done,
    Lost,
    /// Somebody has changed the lease in between; it may still be ours.
    Conflict,
}

pub struct Lock {
    leases: Api<Lease>,
    name: String,
    identity: String,
    duration: Duration,
    /// The version of the lease we saw last, and when it was new to us.
    seen: Option<(String, Instant)>,
    /// Who held it then.
    pub holder: String,
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

    /// When the lease last changed, by our own clock: its holder was alive then.
    pub fn changed_at(&self) -> Option<Instant> {
        self.seen.as_ref().map(|(_, since)| *since)
    }

    /// Tries once to take the lease; the epoch of our new term, if it is ours. It is
    /// above `floor` and above all terms before.
    pub async fn take(&mut self, floor: u64) -> Result<Option<u64>, Error> {
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
        let lasts = before
            .lease_duration_seconds
            .and_then(|seconds| u64::try_from(seconds).ok())
            .map_or(self.duration, Duration::from_secs);
        let is_free = self.holder.is_empty() || self.holder == self.identity;
        if !is_free && now < since + lasts {
            return Ok(None);
        }
        let terms =
            before.lease_transitions.and_then(|terms| u64::try_from(terms).ok()).unwrap_or(0);
        let epoch = terms.max(floor) + 1;
        let spec = self.spec(epoch);
        Ok(self.write(lease, spec).await?.then_some(epoch))
    }

    /// Renews the lease of our term. One that was deleted is lost: the next one
    /// begins a new term.
    pub async fn renew(&mut self) -> Result<Renewal, Error> {
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

    /// Gives the lease back, so that another replica need not wait.
    pub async fn release(&mut self) -> Result<(), Error> {
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
            // Beyond what a Lease can hold, the store alone counts on.
            lease_transitions: Some(i32::try_from(epoch).unwrap_or(i32::MAX)),
            ..LeaseSpec::default()
        }
    }

    /// Whole seconds, and not less than we were told.
    fn seconds(&self) -> Option<i32> {
        i32::try_from(self.duration.as_millis().div_ceil(1_000).max(1)).ok()
    }

    /// Writes over the version we have read, and no other; answers whether nobody
    /// was faster.
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
