//! The operations of a pair: each runs on both sides, and the replies must agree.

use std::collections::HashMap;

use fleet::{Allocation, Edit, Refusal, Removed, merchant::Malformed};
use store::{ScalingStore, Store};
use testkit::operations::{GATEWAY_LEASE, Operation};

use crate::compare::{Pair, chosen, failed};

/// Replaces the error of a malformed document, which the stores word differently.
fn plain(outcome: Result<Allocation, Refusal>) -> Result<Allocation, Refusal> {
    let same_words = |malformed: Option<Malformed>| malformed.map(|_| Malformed::new("malformed"));
    match outcome {
        Ok(mut got) => {
            got.malformed_merchant = same_words(got.malformed_merchant);
            Ok(got)
        }
        Err(mut refusal) => {
            refusal.malformed_merchant = same_words(refusal.malformed_merchant);
            Err(refusal)
        }
    }
}

impl Pair {
    pub(crate) async fn run(&mut self, operation: &Operation) -> Result<(), String> {
        match operation {
            Operation::Allocate(_)
            | Operation::Release(_)
            | Operation::Renew(_)
            | Operation::Confirm(_)
            | Operation::ExtendPending { .. } => self.run_call(operation).await,
            Operation::Attach(_)
            | Operation::Failover(_)
            | Operation::Detach(_)
            | Operation::Heartbeat { .. } => self.run_stream(operation).await,
            Operation::Drain { .. }
            | Operation::Undrain { .. }
            | Operation::Surplus { .. }
            | Operation::Sweep { .. }
            | Operation::Audit => self.run_upkeep(operation).await,
            Operation::Claim(_) | Operation::Tiers { .. } | Operation::Merchant { .. } => {
                self.run_edit(operation).await
            }
            Operation::Outbound(operation) => self.run_outbound(operation).await,
            other => self.run_capacity(other).await,
        }
    }

    /// Runs an operation of a call.
    async fn run_call(&mut self, operation: &Operation) -> Result<(), String> {
        let (store, fleet, now) = (self.store.clone(), &mut self.fleet, self.now);
        let what = format!("{operation:?}");
        match operation {
            Operation::Allocate(request) => {
                let outcome = store.allocate(request).await.map_err(failed)?;
                // A call that uses a reservation may open its pool to waiting calls.
                let mut preferred = match request.reservation {
                    Some(_) => chosen(&store).await?,
                    None => HashMap::new(),
                };
                preferred.extend(outcome.iter().map(|got| (request.call.clone(), got.pod.clone())));
                fleet.prefer(preferred);
                same!(what, plain(outcome), plain(fleet.allocate(request, now)));
            }
            Operation::Release(request) => {
                let outcome = store.release(request).await.map_err(failed)?;
                fleet.prefer(chosen(&store).await?);
                same!(what, outcome, fleet.release(request, now));
            }
            Operation::Renew(request) => {
                let outcome = store.renew(request).await.map_err(failed)?;
                same!(what, outcome, fleet.renew(request, now));
            }
            Operation::Confirm(request) => {
                let outcome = store.confirm(request).await.map_err(failed)?;
                same!(what, outcome, fleet.confirm(request, now));
            }
            Operation::ExtendPending { time } => {
                store.extend_pending(*time).await.map_err(failed)?;
                fleet.extend_pending(*time, now);
            }
            other => return Err(format!("unexpected operation {other:?}")),
        }
        Ok(())
    }

    /// Runs an operation of the media gateway.
    async fn run_stream(&mut self, operation: &Operation) -> Result<(), String> {
        let (store, fleet, now) = (self.store.clone(), &mut self.fleet, self.now);
        let what = format!("{operation:?}");
        match operation {
            Operation::Attach(request) => {
                let outcome = store.attach(request).await.map_err(failed)?;
                let chosen = outcome.iter().map(|got| (request.call.clone(), got.pod.clone()));
                fleet.prefer(chosen.collect());
                same!(what, outcome, fleet.attach(request, now));
            }
            Operation::Failover(request) => {
                let outcome = store.failover(request).await.map_err(failed)?;
                // The freed pod may be handed off, too.
                fleet.prefer(chosen(&store).await?);
                same!(what, outcome, fleet.failover(request, now));
            }
            Operation::Detach(request) => {
                let outcome = store.detach(request).await.map_err(failed)?;
                same!(what, outcome, fleet.detach(request, now));
            }
            Operation::Heartbeat { gateway, relayed } => {
                let outcome = store.heartbeat(gateway, GATEWAY_LEASE, relayed).await;
                let expected = fleet.heartbeat(gateway, GATEWAY_LEASE, relayed, now);
                same!(what, outcome.map_err(failed)?, expected);
            }
            other => return Err(format!("unexpected operation {other:?}")),
        }
        Ok(())
    }

    /// Runs a drain, a sweep or an audit.
    async fn run_upkeep(&mut self, operation: &Operation) -> Result<(), String> {
        let (store, fleet, now) = (self.store.clone(), &mut self.fleet, self.now);
        let what = format!("{operation:?}");
        match operation {
            Operation::Drain { pod, ttl } => {
                let outcome = store.drain(pod, *ttl).await.map_err(failed)?;
                same!(what, outcome, fleet.drain(pod, *ttl, now));
            }
            Operation::Undrain { pod } => {
                let outcome = store.undrain(pod).await.map_err(failed)?;
                same!(what, outcome, fleet.undrain(pod));
            }
            Operation::Surplus { pod, uid, ttl, writer } => {
                let outcome = store.set_surplus(pod, uid, *ttl, writer.get()).await;
                let outcome = outcome.map_err(failed)?;
                same!(what, outcome, fleet.set_surplus(pod, uid, *ttl, writer.get(), now));
            }
            Operation::Sweep { limit } => {
                let outcome = store.sweep(*limit).await.map_err(failed)?;
                fleet.prefer(chosen(&store).await?);
                same!(what, outcome, fleet.sweep(*limit, now));
            }
            Operation::Audit => {
                let mut names = fleet.pod_names();
                names.sort();
                same!(what, store.audit().await.map_err(failed)?, fleet.audit(&names));
            }
            other => return Err(format!("unexpected operation {other:?}")),
        }
        Ok(())
    }

    /// Runs an edit of the configuration, or a claim of the pods.
    async fn run_edit(&mut self, operation: &Operation) -> Result<(), String> {
        let (store, fleet, now) = (self.store.clone(), &mut self.fleet, self.now);
        let what = format!("{operation:?}");
        match operation {
            Operation::Claim(claim) => {
                let outcome = store.claim_pods(claim).await.map_err(failed)?;
                same!(what, outcome, fleet.claim_pods(claim, now));
            }
            Operation::Tiers { tiers, expected } => {
                let edit = || Edit { expected: expected.as_ref(), by: "admin (token 2)" };
                let outcome = store.apply_tiers(tiers, edit()).await.map_err(failed)?;
                same!(what, outcome, fleet.apply_tiers(tiers, edit()));
            }
            Operation::Merchant { id, document, expected } => {
                let edit = || Edit { expected: *expected, by: "admin (token 2)" };
                let outcome = store.set_merchant(id, *document, edit()).await.map_err(failed)?;
                same!(what, outcome, fleet.set_merchant(id, *document, edit()));
            }
            other => return Err(format!("unexpected operation {other:?}")),
        }
        Ok(())
    }

    /// Runs a write of a pod. The fleet hands the pods off to requeued calls that Redis has chosen.
    pub(crate) async fn write_pod(&mut self, operation: &Operation) -> Result<(), String> {
        let (store, fleet, now) = (self.store.clone(), &mut self.fleet, self.now);
        let what = format!("{operation:?}");
        match operation {
            Operation::Observe { pod, facts, writer } => {
                let mut redis =
                    store.observe_pod(pod, facts, writer.get()).await.map_err(failed)?;
                fleet.prefer(chosen(&store).await?);
                let mut ours = fleet.observe_pod(pod, facts, writer.get(), now);
                for observed in [&mut redis, &mut ours].into_iter().flatten() {
                    observed.ended.sort_by(|a, b| a.call.cmp(&b.call));
                }
                same!(what, redis, ours);
            }
            Operation::Remove { pod, uid, mode, writer } => {
                let redis = store.remove_pod(pod, uid, *mode, writer.get()).await;
                let mut redis = redis.map_err(failed)?;
                fleet.prefer(chosen(&store).await?);
                let mut ours = fleet.remove_pod(pod, uid, *mode, writer.get(), now);
                for removed in [&mut redis, &mut ours] {
                    if let Ok(Removed::Gone { ended }) = removed {
                        ended.sort_by(|a, b| a.call.cmp(&b.call));
                    }
                }
                same!(what, redis, ours);
            }
            Operation::Move { pod, uid, to, writer } => {
                let redis = store.move_pod(pod, uid, to, writer.get()).await.map_err(failed)?;
                same!(what, redis, fleet.move_pod(pod, uid, to, writer.get()));
            }
            other => return Err(format!("unexpected operation {other:?}")),
        }
        Ok(())
    }
}
