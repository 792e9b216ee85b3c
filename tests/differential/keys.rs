//! Comparison of the documented keys with the fleet.

use std::collections::BTreeMap;

use fleet::{
    Change, GatewayStatus, PodCall, PodStatus,
    names::{CallSid, PodName, Pool},
    tiers::TierKind,
};

use crate::compare::{Pair, Schema};
use testkit::snapshot::Snapshot;

impl Pair {
    /// Compares the keys, read without the functions.
    pub(super) fn keys_agree(&mut self) -> Result<(), String> {
        let keys = Snapshot::read(&mut self.plain, "voice:")?;
        let found = keys.state("voice:", self.fleet.tiers())?.violations();
        if !found.is_empty() {
            return Err(format!("violations in the keys: {found:?}"));
        }
        self.pool_keys_agree(&keys)?;
        let mut live = BTreeMap::new();
        let failures = self.failures();
        for pod in self.fleet.pods() {
            self.pod_keys_agree(&keys, &pod)?;
            let fields = keys.hash(&format!("voice:pod:{}", pod.name))?;
            let counted = fields.get("failures").and_then(|text| text.parse().ok()).unwrap_or(0);
            let expected = failures.get(&pod.name).copied().unwrap_or(0);
            same!(format!("failures of {}", pod.name), counted, expected);
            for call in &pod.calls {
                self.call_keys_agree(&keys, &pod, call)?;
                live.insert(call.call.to_string(), call.lease_until as f64);
            }
        }
        same!("voice:calls", keys.scores("voice:calls")?, live);
        self.gateway_keys_agree(&keys)
    }

    /// Consecutive failures of the pods that have any.
    fn failures(&self) -> BTreeMap<PodName, u32> {
        let failures = |change| match change {
            Change::Health { pod, failures, .. } => Some((pod, failures)),
            _ => None,
        };
        self.fleet.facts().into_iter().filter_map(failures).collect()
    }

    /// Compares the leases and the calls of the gateways.
    fn gateway_keys_agree(&self, keys: &Snapshot) -> Result<(), String> {
        let (mut leases, mut indexes) = (BTreeMap::new(), Vec::new());
        for GatewayStatus { gateway, until, lease, calls } in self.fleet.gateways() {
            leases.insert(gateway.to_string(), format!("{until} {lease}"));
            let key = format!("voice:gateway:{gateway}");
            let score = |(call, is_ending): (CallSid, bool)| {
                (call.to_string(), f64::from(u8::from(is_ending)))
            };
            let ours: BTreeMap<String, f64> = calls.into_iter().map(score).collect();
            same!(key, keys.scores(&key)?, ours);
            indexes.extend((!ours.is_empty()).then_some(key));
        }
        same!("voice:gateways", keys.hash("voice:gateways")?, leases);
        same!("indexes of gateways", keys.names("voice:gateway:"), indexes);
        Ok(())
    }

    fn pool_keys_agree(&self, keys: &Snapshot) -> Result<(), String> {
        for pool in self.fleet.status().pools {
            let (available, assigned) = match &pool.pool {
                Pool::Tier(tier) => {
                    (format!("voice:pool:{tier}:available"), format!("voice:pool:{tier}:assigned"))
                }
                Pool::Merchant(id) => {
                    (format!("voice:merchant:{id}:pods"), format!("voice:merchant:{id}:assigned"))
                }
            };
            let redis: BTreeMap<String, f64> = match pool.kind {
                Some(TierKind::Shared { .. }) => keys.scores(&available)?,
                _ => keys.set(&available)?.into_iter().map(|pod| (pod, 0.0)).collect(),
            };
            let ours: BTreeMap<String, f64> = self
                .fleet
                .available(&pool.pool)
                .into_iter()
                .map(|(pod, calls)| (pod.to_string(), calls as f64))
                .collect();
            same!(available, redis, ours);
            let at_risk = assigned.replace(":assigned", ":at_risk");
            let ours: BTreeMap<String, f64> = self
                .fleet
                .at_risk(&pool.pool)
                .into_iter()
                .map(|(pod, calls)| (pod.to_string(), calls as f64))
                .collect();
            same!(at_risk, keys.scores(&at_risk)?, ours);
            let members = keys.set(&assigned)?;
            let is_member = |pod: &PodStatus| pod.pool.as_ref() == Some(&pool.pool);
            let ours: Vec<String> = self
                .fleet
                .pods()
                .iter()
                .filter(|pod| is_member(pod))
                .map(|pod| pod.name.to_string())
                .collect();
            same!(assigned, members, ours);
        }
        Ok(())
    }

    fn pod_keys_agree(&self, keys: &Snapshot, pod: &PodStatus) -> Result<(), String> {
        let name = &pod.name;
        let tier = keys.string(&format!("voice:pod:tier:{name}"))?;
        same!("tier", tier, pod.pool.as_ref().map(Pool::as_tier_value));
        let lease = keys.string(&format!("voice:lease:{name}"))?;
        same!(
            format!("lease of {name}"),
            lease,
            pod.calls.first().map(|call| call.call.to_string())
        );
        let draining = keys.string(&format!("voice:pod:draining:{name}"))?;
        same!(
            "draining",
            draining,
            pod.draining_until.map(|_| {
                let mark = if pod.is_surplus { "surplus" } else { "true" };
                mark.to_owned()
            })
        );
        let fields = keys.hash(&format!("voice:pod:{name}"))?;
        same!(format!("plain of {name}"), &fields["plain"], &plain_pool(&fields, tier));
        let expected = if pod.is_leaving() {
            "draining"
        } else if !pod.calls.is_empty() {
            "allocated"
        } else if pod.quarantined_until.is_some() {
            "quarantined"
        } else {
            "available"
        };
        same!(format!("status of {name}"), &fields["status"], expected);
        if let Some(first) = pod.calls.first() {
            let left = keys.ttl(&format!("voice:lease:{name}")).unwrap_or(0);
            let due = first.lease_until.saturating_sub(self.now);
            if !(due..=due + 60_000).contains(&left) {
                return Err(format!("the lease of {name} expires in {left} ms, due in {due}"));
            }
        }
        Ok(())
    }

    fn call_keys_agree(
        &self,
        keys: &Snapshot,
        pod: &PodStatus,
        call: &PodCall,
    ) -> Result<(), String> {
        let record = keys.hash(&format!("voice:call:{}", call.call))?;
        same!("pod_name", record.get("pod_name"), Some(&pod.name.to_string()));
        same!(
            "allocated_at",
            record.get("allocated_at"),
            Some(&(call.allocated_at / 1_000).to_string())
        );
        let ours = self.fleet.call(&call.call).unwrap();
        same!("source_pool", record.get("source_pool"), Some(&ours.source_pool.to_string()));
        same!(
            "merchant_id",
            record.get("merchant_id"),
            Some(&ours.merchant.map(|id| id.to_string()).unwrap_or_default())
        );
        let [own, other] = self.field_names();
        let field = |name: &str| record.get(name).map(String::as_str);
        let stream = ours.stream.map(|it| {
            let ending = it.ending.map_or("", |cause| cause.as_str());
            format!("{} {} {} {ending}", it.gateway, it.stream, it.since)
        });
        same!("stream", field("stream"), stream.as_deref());
        let pod_attempt = field(own[1]).or(field(other[1])).unwrap_or_default();
        same!("pod attempt", pod_attempt.parse().unwrap_or(0), ours.pod_attempt);
        if !self.has_mixed_records && self.schema != Schema::Changing {
            same!("fields of the other schema", other.map(field), [None, None]);
        }
        Ok(())
    }
}

/// The expected field `plain`: the pool of a pod whose other facts are all defaults.
fn plain_pool(fields: &BTreeMap<String, String>, tier: Option<String>) -> String {
    let field = |name: &str| fields.get(name).map_or("", String::as_str);
    let tier = tier.unwrap_or_default();
    let is_in_pinned_pool =
        ["", &tier, tier.strip_prefix("merchant:").unwrap_or(&tier)].contains(&field("pin"));
    let is_healthy =
        ["", "0"].contains(&field("failures")) && field("quarantined_until").is_empty();
    let is_in_service = field("ready") == "1" && field("terminating") != "1";
    let is_safe = field("at_risk") != "1";
    if is_in_pinned_pool && is_healthy && is_in_service && is_safe { tier } else { String::new() }
}
