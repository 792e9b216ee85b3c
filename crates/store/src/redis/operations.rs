//! The operations of the store as calls of their Redis functions.

use std::{collections::BTreeMap, future::Future, pin::Pin, sync::atomic::Ordering};

use futures_util::{StreamExt, TryStreamExt, future::try_join_all, stream};
use redis::Value;

use super::keys;
use super::{
    Redis,
    reply::{self, FunctionReply, call_row, pod_row},
    retry::Deadline,
    tier_table,
};
use crate::{Notifier, Reply, Store, StoreError, wall_clock};
use fleet::{
    AbandonedCall, Allocate, Allocation, Attach, AttachRefused, Attached, Audited, CallLookup,
    CallPage, CallQuery, Claim, ClaimRefused, Claimant, Confirm, Confirmed, Conflict, Detach,
    Drained, Edit, EventId, Failover, FailoverRefused, Heartbeat, LoggedEvent, Millis, MoveRefused,
    NotReleased, Observed, PodFacts, PodStatus, PodWriter, Refusal, Release, Released, RemovalMode,
    Removed, Renew, Renewed, Status, Step, Swept, Undrained, UnknownPod, WriteRefused,
    names::{CallSid, GatewayId, MerchantId, PodName, Pool},
    tiers::Tiers,
};

/// Calls per run of the Redis function.
const RENEWAL_BATCH: usize = 500;
/// Pools that a status reads concurrently: below the minimum number of permits for observers.
const CONCURRENT_POOLS: usize = 4;
/// Columns of a pool in the reply of the function `status`.
pub(super) const STATUS_COLUMNS: usize = 9;

pub(super) fn flag(flag: bool) -> &'static str {
    if flag { "1" } else { "0" }
}

pub(super) fn unexpected(reply: &FunctionReply) -> StoreError {
    StoreError::Failed(format!(
        "the Redis function replied {:?}, which is not one of its replies",
        reply.word
    ))
}

impl Redis {
    /// The reason why a write of pods was refused; `None` if it was not.
    pub(super) fn write_refused(
        &self,
        reply: &mut FunctionReply,
        epoch: u64,
    ) -> Result<Option<WriteRefused>, StoreError> {
        Ok(match reply.word.as_str() {
            "fenced" => Some(WriteRefused::Fenced { epoch, current: reply.number()? }),
            "foreign" => {
                let owner = reply.text()?;
                self.refuse_foreign(&owner);
                Some(WriteRefused::Foreign { owner })
            }
            _ => None,
        })
    }
}

fn abandoned(texts: &[String]) -> Result<Vec<AbandonedCall>, StoreError> {
    let read = |row: &[String]| {
        Ok(AbandonedCall { call: reply::parse(&row[0])?, waited: reply::parse(&row[1])? })
    };
    texts.chunks_exact(2).map(read).collect()
}

impl Store for Redis {
    fn allocate<'a>(&'a self, request: &'a Allocate) -> Reply<'a, Result<Allocation, Refusal>> {
        Box::pin(self.allocate_call(request))
    }

    fn release<'a>(&'a self, request: &'a Release) -> Reply<'a, Result<Released, NotReleased>> {
        Box::pin(self.release_call(request))
    }

    fn confirm<'a>(&'a self, request: &'a Confirm) -> Reply<'a, Confirmed> {
        Box::pin(self.confirm_call(request))
    }

    fn extend_pending(&self, time: Millis) -> Reply<'_, ()> {
        Box::pin(self.extend_all_pending(time))
    }

    fn attach<'a>(&'a self, request: &'a Attach) -> Reply<'a, Result<Attached, AttachRefused>> {
        Box::pin(self.attach_stream(request))
    }

    fn failover<'a>(
        &'a self,
        request: &'a Failover,
    ) -> Reply<'a, Result<Attached, FailoverRefused>> {
        Box::pin(self.move_stream(request))
    }

    fn detach<'a>(&'a self, request: &'a Detach) -> Reply<'a, Result<Released, NotReleased>> {
        Box::pin(self.detach_stream(request))
    }

    fn heartbeat<'a>(
        &'a self,
        gateway: &'a GatewayId,
        lease: Millis,
        relayed: &'a [CallSid],
    ) -> Reply<'a, Heartbeat> {
        Box::pin(self.gateway_heartbeat(gateway, lease, relayed))
    }

    fn record_figures<'a>(
        &'a self,
        figures: &'a [(CallSid, String)],
        ttl: Millis,
    ) -> Reply<'a, ()> {
        Box::pin(self.record_stream_figures(figures, ttl))
    }

    fn figures<'a>(&'a self, call: &'a CallSid) -> Reply<'a, Option<String>> {
        Box::pin(async move {
            let key = format!("{}{call}", self.key(keys::FIGURES));
            self.query_key(&key, redis::cmd("GET").arg(&key)).await
        })
    }

    fn media_secret<'a>(&'a self, candidate: &'a str) -> Reply<'a, String> {
        Box::pin(self.shared_media_secret(candidate))
    }

    fn renew<'a>(&'a self, request: &'a Renew) -> Reply<'a, Renewed> {
        Box::pin(async move {
            let pod = request.pod.as_ref().map_or("", |pod| pod.as_str());
            let (lease, expiry) =
                (request.lease_ttl.to_string(), self.record_expiry(request.lease_ttl));
            let replies = request.calls.chunks(RENEWAL_BATCH).map(async |batch| {
                let mut args = vec![lease.as_str(), &expiry, pod];
                args.extend(batch.iter().map(CallSid::as_str));
                // A late renewal is still correct.
                let reply = self.client.run(&self.functions().renew, &args, Deadline::None).await?;
                self.check_initialized(reply)
            });
            let mut renewed = Renewed::default();
            for mut reply in try_join_all(replies).await? {
                renewed.until = reply.number()?;
                renewed.unknown.extend(reply.names()?);
                renewed.registered.extend(reply.names()?);
                renewed.retry.extend(reply.names()?);
            }
            Ok(renewed)
        })
    }

    fn drain<'a>(
        &'a self,
        pod: &'a PodName,
        ttl: Millis,
    ) -> Reply<'a, Result<Drained, UnknownPod>> {
        Box::pin(async move {
            let mut reply =
                self.run(&self.functions().drain, &[pod.as_str(), &ttl.to_string()]).await?;
            if reply.word == "unknown" {
                return Ok(Err(UnknownPod));
            }
            Ok(Ok(Drained { active_calls: reply.number()? as usize, until: reply.number()? }))
        })
    }

    fn undrain<'a>(&'a self, pod: &'a PodName) -> Reply<'a, Result<Undrained, UnknownPod>> {
        Box::pin(async move {
            let mut reply = self.run(&self.functions().undrain, &[pod.as_str()]).await?;
            if reply.word == "unknown" {
                return Ok(Err(UnknownPod));
            }
            Ok(Ok(Undrained {
                was_draining: reply.flag()?,
                was_quarantined: reply.flag()?,
                is_terminating: reply.flag()?,
                pool: reply.parse_some()?,
            }))
        })
    }

    fn claim_pods<'a>(&'a self, claim: &'a Claim) -> Reply<'a, Result<u64, ClaimRefused>> {
        Box::pin(async move {
            let (epoch, digest, is_new) = match &claim.by {
                Claimant::Leader { epoch } => (*epoch, "", false),
                Claimant::List { digest, is_new } => (None, digest.as_str(), *is_new),
            };
            self.record_origin(&claim.origin);
            if let Some(owner) = self.foreign_origin() {
                return Ok(Err(WriteRefused::Foreign { owner }.into()));
            }
            let epoch_text = epoch.map(|epoch| epoch.to_string()).unwrap_or_default();
            let origin = claim.origin.to_string();
            let args = [&origin, &epoch_text, digest, flag(is_new), flag(claim.force)];
            let mut reply = self.run(&self.functions().claim_pods, &args).await?;
            if let Some(refused) = self.write_refused(&mut reply, epoch.unwrap_or_default())? {
                return Ok(Err(refused.into()));
            }
            match reply.word.as_str() {
                "claimed" => {
                    self.force_origin.store(false, Ordering::Relaxed);
                    Ok(Ok(reply.number()?))
                }
                "superseded" => Ok(Err(ClaimRefused::Superseded)),
                _ => Err(unexpected(&reply)),
            }
        })
    }

    fn observe_pod<'a>(
        &'a self,
        pod: &'a PodName,
        facts: &'a PodFacts,
        writer: PodWriter<'a>,
    ) -> Reply<'a, Result<Observed, WriteRefused>> {
        Box::pin(async move {
            let pin = facts.pin.as_ref().map(Step::to_string).unwrap_or_default();
            let restarts = facts.restarts.to_string();
            let (origin, epoch) = (writer.origin.to_string(), writer.epoch.to_string());
            let args = [
                &origin,
                &epoch,
                pod.as_str(),
                &facts.uid,
                &facts.address,
                flag(facts.ready),
                flag(facts.terminating),
                flag(facts.at_risk),
                &restarts,
                &pin,
            ];
            let mut reply = self.run(&self.functions().observe_pod, &args).await?;
            if let Some(refused) = self.write_refused(&mut reply, writer.epoch)? {
                return Ok(Err(refused));
            }
            match reply.word.as_str() {
                "observed" => Ok(Ok(Observed {
                    joined: reply.flag()?,
                    pool: reply.parse_some()?,
                    ended: reply.ended_on(pod)?,
                })),
                _ => Err(unexpected(&reply)),
            }
        })
    }

    fn remove_pod<'a>(
        &'a self,
        pod: &'a PodName,
        uid: &'a str,
        mode: RemovalMode,
        writer: PodWriter<'a>,
    ) -> Reply<'a, Result<Removed, WriteRefused>> {
        Box::pin(async move {
            let mode = match mode {
                RemovalMode::Immediate => "now",
                RemovalMode::WhenIdle => "when_idle",
            };
            let (origin, epoch) = (writer.origin.to_string(), writer.epoch.to_string());
            let args = [&origin, &epoch, pod.as_str(), uid, mode];
            let mut reply = self.run(&self.functions().remove_pod, &args).await?;
            if let Some(refused) = self.write_refused(&mut reply, writer.epoch)? {
                return Ok(Err(refused));
            }
            Ok(Ok(match reply.word.as_str() {
                "gone" => Removed::Gone { ended: reply.ended_on(pod)? },
                "busy" => Removed::Busy,
                "not_there" => Removed::NotFound,
                _ => return Err(unexpected(&reply)),
            }))
        })
    }

    fn move_pod<'a>(
        &'a self,
        pod: &'a PodName,
        uid: &'a str,
        to: &'a Pool,
        writer: PodWriter<'a>,
    ) -> Reply<'a, Result<(), MoveRefused>> {
        Box::pin(async move {
            let (origin, epoch) = (writer.origin.to_string(), writer.epoch.to_string());
            let args = [&origin, &epoch, pod.as_str(), uid, &to.as_tier_value()];
            let mut reply = self.run(&self.functions().move_pod, &args).await?;
            if let Some(refused) = self.write_refused(&mut reply, writer.epoch)? {
                return Ok(Err(refused.into()));
            }
            Ok(match reply.word.as_str() {
                "moved" => Ok(()),
                "not_there" => Err(MoveRefused::NotFound),
                "not_idle" => Err(MoveRefused::NotIdle),
                "unknown_pool" => Err(MoveRefused::UnknownPool),
                _ => return Err(unexpected(&reply)),
            })
        })
    }

    fn apply_tiers<'a>(
        &'a self,
        tiers: &'a Tiers,
        edit: Edit<'a, Tiers>,
    ) -> Reply<'a, Result<(), Conflict>> {
        Box::pin(async move {
            if !self.client.is_up() {
                return Err(self.client.unavailable());
            }
            self.edit_tiers(tiers, edit).await
        })
    }

    fn set_merchant<'a>(
        &'a self,
        id: &'a MerchantId,
        document: Option<&'a str>,
        edit: Edit<'a, str>,
    ) -> Reply<'a, Result<(), Conflict>> {
        Box::pin(async move {
            let expected = edit.expected.map_or(String::new(), |known| format!("={known}"));
            let reply = match document {
                Some(document) => {
                    let args = [id.as_str(), document, &expected, edit.by];
                    self.run(&self.functions().set_merchant, &args).await?
                }
                None => {
                    let args = [id.as_str(), &expected, edit.by];
                    self.run(&self.functions().delete_merchant, &args).await?
                }
            };
            Ok(if reply.word == "changed" { Err(Conflict) } else { Ok(()) })
        })
    }

    fn sweep(&self, limit: usize) -> Reply<'_, Swept> {
        Box::pin(async move {
            let args = [limit.to_string(), self.lease_ttl.to_string()];
            let mut reply =
                self.run(&self.functions().sweep, &args.each_ref().map(|it| it.as_str())).await?;
            let swept = Swept {
                abandoned: abandoned(&reply.texts()?)?,
                expired: reply.ended()?,
                undrained: reply.names()?,
                restored: reply.names()?,
                reservations: reply.names()?,
            };
            if reply.flag()? {
                self.record_reregistration_window(reply.number()?);
                if reply.flag()? {
                    self.audit_due.store(true, Ordering::Relaxed);
                    self.client.maintenance_due.notify_one();
                }
                // Another router may have migrated the store.
                if reply.text()?.parse().is_ok_and(|schema: u64| schema != self.layout.schema()) {
                    self.layout.check();
                }
            } else {
                self.client.open_circuit();
            }
            Ok(swept)
        })
    }

    fn audit(&self) -> Reply<'_, Audited> {
        Box::pin(self.audit_all())
    }

    fn status(&self) -> Reply<'_, Status> {
        Box::pin(async move {
            let mut reply = self.run(&self.functions().status, &[]).await?;
            let (active_calls, waiting) = (reply.number()? as usize, reply.number()? as usize);
            let table = reply.texts()?;
            let rows = reply.texts()?;
            let tiers = tier_table::read(&table, &reply.texts()?)?;
            let mut counts = BTreeMap::new();
            for row in rows.chunks_exact(STATUS_COLUMNS) {
                let Ok(pool) = row[0].parse::<Pool>() else {
                    tracing::warn!(
                        pool = row[0],
                        "voice:pools contains an invalid pool name; skipping it"
                    );
                    continue;
                };
                let mut numbers = [0; STATUS_COLUMNS - 1];
                for (number, text) in numbers.iter_mut().zip(&row[1..]) {
                    *number = reply::parse(text)?;
                }
                if numbers[0] > 0 || tiers.defines(&pool) {
                    counts.insert(pool, numbers);
                }
            }
            for (name, _) in tiers.iter() {
                counts
                    .entry(tiers.pool(name).expect("each tier has a pool"))
                    .or_insert([0; STATUS_COLUMNS - 1]);
            }
            let pools =
                counts.into_iter().map(|(pool, counts)| self.pool_status(pool, &tiers, counts));
            let pools = stream::iter(pools).buffered(CONCURRENT_POOLS).try_collect().await?;
            Ok(Status { pools, active_calls, waiting })
        })
    }

    fn tiers(&self) -> Reply<'_, Tiers> {
        Box::pin(async move {
            let mut reply = self.run(&self.functions().status, &[]).await?;
            reply.number()?;
            reply.number()?;
            let table = reply.texts()?;
            reply.list()?;
            tier_table::read(&table, &reply.texts()?)
        })
    }

    fn merchant<'a>(&'a self, id: &'a MerchantId) -> Reply<'a, Option<String>> {
        Box::pin(async move {
            let key = self.key(keys::MERCHANT_CONFIG);
            self.query_key(&key, redis::cmd("HGET").arg(&key).arg(id.as_str())).await
        })
    }

    fn pod<'a>(&'a self, pod: &'a PodName) -> Reply<'a, Option<PodStatus>> {
        Box::pin(async move {
            let mut reply = self.run(&self.functions().pod, &[pod.as_str()]).await?;
            if reply.word == "unknown" {
                return Ok(None);
            }
            pod_row(Value::Array(reply.list()?)).map(Some)
        })
    }

    fn pods(&self) -> Reply<'_, Vec<PodStatus>> {
        Box::pin(self.list_pods())
    }

    fn call<'a>(&'a self, call: &'a CallSid) -> Reply<'a, Option<CallLookup>> {
        Box::pin(async move {
            let mut reply = self.run(&self.functions().call, &[call.as_str()]).await?;
            if reply.word == "not_found" {
                return Ok(None);
            }
            call_row(Value::Array(reply.list()?)).map(Some)
        })
    }

    fn calls<'a>(&'a self, query: &'a CallQuery) -> Reply<'a, CallPage> {
        Box::pin(self.list_calls(query))
    }

    fn merchants<'a>(
        &'a self,
        after: Option<&'a MerchantId>,
        limit: usize,
    ) -> Reply<'a, Vec<(MerchantId, String)>> {
        Box::pin(self.list_merchants(after, limit))
    }

    fn events_after(&self, id: EventId, limit: usize) -> Reply<'_, Vec<LoggedEvent>> {
        Box::pin(self.events("XRANGE", [format!("({id}"), "+".into()], limit))
    }

    fn events_before(&self, id: Option<EventId>, limit: usize) -> Reply<'_, Vec<LoggedEvent>> {
        let from = id.map_or("+".into(), |id| format!("({id}"));
        Box::pin(self.events("XREVRANGE", [from, "-".into()], limit))
    }

    fn handoffs(&self) -> &Notifier<CallSid> {
        &self.handoffs
    }

    fn drains(&self) -> &Notifier<PodName> {
        &self.drains
    }

    fn endings(&self) -> &Notifier<GatewayId> {
        &self.endings
    }

    fn now(&self) -> Millis {
        self.client.clock.now().unwrap_or_else(wall_clock)
    }

    fn outage(&self) -> Option<String> {
        (!self.client.is_up()).then(|| self.client.reason())
    }

    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {
            self.stopping.cancel();
            self.tasks.wait().await;
        })
    }
}
