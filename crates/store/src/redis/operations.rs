//! Every operation as its script: arguments in, answer out.

use std::{collections::BTreeMap, future::Future, pin::Pin, sync::atomic::Ordering};

use futures_util::{StreamExt, TryStreamExt, future::try_join_all, stream};
use redis::Value;

use super::keys;
use super::{
    Redis,
    client::Timeliness,
    reply::{self, Reply as Answer, call_row, pod_row},
    tier_table,
};
use crate::{Notifier, Reply, Store, StoreError, wall_clock};
use fleet::{
    Abandoned, Allocate, Allocation, Audited, CallPage, CallQuery, Changed, Claim, ClaimRefused,
    Claimant, Confirm, Confirmed, Departure, Drained, Edit, EventId, Found, LIST_TTL, Logged,
    Millis, MoveRefused, NotReleased, Observed, PodFacts, PodStatus, PodWriter, Refusal, Release,
    Released, Removed, Renew, Renewed, Status, Swept, Undrained, UnknownPod, WriteRefused,
    merchant::Step,
    names::{CallSid, MerchantId, PodName, Pool},
    tiers::Tiers,
};

/// Calls that one renewal may name.
const RENEWALS: usize = 500;
/// Pools that a status reads at the same time: less than an observer always has room for.
const POOLS_AT_ONCE: usize = 4;

pub(super) fn flag(flag: bool) -> &'static str {
    if flag { "1" } else { "0" }
}

pub(super) fn unexpected(answer: &Answer) -> StoreError {
    StoreError::Failed(format!("the store answered {:?}, which nobody expects", answer.word))
}

impl Redis {
    /// Why a write of pods was refused; `None` if it was not.
    fn write_refused(
        &self,
        answer: &mut Answer,
        epoch: u64,
    ) -> Result<Option<WriteRefused>, StoreError> {
        Ok(match answer.word.as_str() {
            "fenced" => Some(WriteRefused::Fenced { epoch, current: answer.number()? }),
            "foreign" => {
                let owner = answer.text()?;
                self.refuse_foreign(&owner);
                Some(WriteRefused::Foreign { owner })
            }
            _ => None,
        })
    }
}

fn abandoned(texts: &[String]) -> Result<Vec<Abandoned>, StoreError> {
    let read = |row: &[String]| {
        Ok(Abandoned { call: reply::parse(&row[0])?, waited: reply::parse(&row[1])? })
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

    fn spare(&self, time: Millis) -> Reply<'_, ()> {
        Box::pin(self.spare_all(time))
    }

    fn renew<'a>(&'a self, request: &'a Renew) -> Reply<'a, Renewed> {
        Box::pin(async move {
            let pod = request.pod.as_ref().map_or("", |pod| pod.as_str());
            let (lease, life) =
                (request.lease_ttl.to_string(), self.record_life(request.lease_ttl));
            let answers = request.calls.chunks(RENEWALS).map(async |some| {
                let mut args = vec![lease.as_str(), &life, pod];
                args.extend(some.iter().map(CallSid::as_str));
                // A call that is renewed late is renewed all the same.
                let answer =
                    self.link.run(&self.scripts.renew, &args, Timeliness::Whenever).await?;
                self.found(answer)
            });
            let mut renewed = Renewed::default();
            for mut answer in try_join_all(answers).await? {
                renewed.until = answer.number()?;
                renewed.unknown.extend(answer.names()?);
                renewed.adopted.extend(answer.names()?);
                renewed.later.extend(answer.names()?);
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
            let mut answer =
                self.run(&self.scripts.drain, &[pod.as_str(), &ttl.to_string()]).await?;
            if answer.word == "unknown" {
                return Ok(Err(UnknownPod));
            }
            Ok(Ok(Drained { active_calls: answer.number()? as usize, until: answer.number()? }))
        })
    }

    fn undrain<'a>(&'a self, pod: &'a PodName) -> Reply<'a, Result<Undrained, UnknownPod>> {
        Box::pin(async move {
            let mut answer = self.run(&self.scripts.undrain, &[pod.as_str()]).await?;
            if answer.word == "unknown" {
                return Ok(Err(UnknownPod));
            }
            Ok(Ok(Undrained {
                was_draining: answer.flag()?,
                was_quarantined: answer.flag()?,
                is_terminating: answer.flag()?,
                pool: answer.parse_some()?,
            }))
        })
    }

    fn claim_pods<'a>(&'a self, claim: &'a Claim) -> Reply<'a, Result<u64, ClaimRefused>> {
        Box::pin(async move {
            let (epoch, digest, is_new) = match &claim.by {
                Claimant::Leader { epoch } => (*epoch, "", false),
                Claimant::List { digest, is_new } => (None, digest.as_str(), *is_new),
            };
            self.note_origin(&claim.origin);
            if let Some(owner) = self.foreign() {
                return Ok(Err(WriteRefused::Foreign { owner }.into()));
            }
            let epoch_text = epoch.map(|epoch| epoch.to_string()).unwrap_or_default();
            let origin = claim.origin.to_string();
            let list_ttl = LIST_TTL.to_string();
            let args = [&origin, &epoch_text, digest, flag(is_new), flag(claim.force), &list_ttl];
            let mut answer = self.run(&self.scripts.claim_pods, &args).await?;
            if let Some(refused) = self.write_refused(&mut answer, epoch.unwrap_or_default())? {
                return Ok(Err(refused.into()));
            }
            match answer.word.as_str() {
                "claimed" => {
                    self.force_origin.store(false, Ordering::Relaxed);
                    Ok(Ok(answer.number()?))
                }
                "superseded" => Ok(Err(ClaimRefused::Superseded)),
                _ => Err(unexpected(&answer)),
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
                &restarts,
                &pin,
            ];
            let mut answer = self.run(&self.scripts.observe_pod, &args).await?;
            if let Some(refused) = self.write_refused(&mut answer, writer.epoch)? {
                return Ok(Err(refused));
            }
            match answer.word.as_str() {
                "observed" => Ok(Ok(Observed {
                    joined: answer.flag()?,
                    pool: answer.parse_some()?,
                    ended: answer.ended_on(pod)?,
                })),
                _ => Err(unexpected(&answer)),
            }
        })
    }

    fn remove_pod<'a>(
        &'a self,
        pod: &'a PodName,
        uid: &'a str,
        departure: Departure,
        writer: PodWriter<'a>,
    ) -> Reply<'a, Result<Removed, WriteRefused>> {
        Box::pin(async move {
            let departure = match departure {
                Departure::Now => "now",
                Departure::WhenIdle => "when_idle",
            };
            let (origin, epoch) = (writer.origin.to_string(), writer.epoch.to_string());
            let args = [&origin, &epoch, pod.as_str(), uid, departure];
            let mut answer = self.run(&self.scripts.remove_pod, &args).await?;
            if let Some(refused) = self.write_refused(&mut answer, writer.epoch)? {
                return Ok(Err(refused));
            }
            Ok(Ok(match answer.word.as_str() {
                "gone" => Removed::Gone { ended: answer.ended_on(pod)? },
                "busy" => Removed::Busy,
                "not_there" => Removed::NotThere,
                _ => return Err(unexpected(&answer)),
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
            let mut answer = self.run(&self.scripts.move_pod, &args).await?;
            if let Some(refused) = self.write_refused(&mut answer, writer.epoch)? {
                return Ok(Err(refused.into()));
            }
            Ok(match answer.word.as_str() {
                "moved" => Ok(()),
                "not_there" => Err(MoveRefused::NotThere),
                "not_idle" => Err(MoveRefused::NotIdle),
                "unknown_pool" => Err(MoveRefused::UnknownPool),
                _ => return Err(unexpected(&answer)),
            })
        })
    }

    fn apply_tiers<'a>(
        &'a self,
        tiers: &'a Tiers,
        edit: Edit<'a, Tiers>,
    ) -> Reply<'a, Result<(), Changed>> {
        Box::pin(async move {
            if !self.link.is_up() {
                return Err(self.link.out());
            }
            self.edit_tiers(tiers, edit).await
        })
    }

    fn set_merchant<'a>(
        &'a self,
        id: &'a MerchantId,
        document: Option<&'a str>,
        edit: Edit<'a, str>,
    ) -> Reply<'a, Result<(), Changed>> {
        Box::pin(async move {
            let instead_of = edit.instead_of.map_or(String::new(), |known| format!("={known}"));
            let answer = match document {
                Some(document) => {
                    let args = [id.as_str(), document, &instead_of, edit.by];
                    self.run(&self.scripts.set_merchant, &args).await?
                }
                None => {
                    let args = [id.as_str(), &instead_of, edit.by];
                    self.run(&self.scripts.delete_merchant, &args).await?
                }
            };
            Ok(if answer.word == "changed" { Err(Changed) } else { Ok(()) })
        })
    }

    fn sweep(&self, most: usize) -> Reply<'_, Swept> {
        Box::pin(async move {
            let args = [most.to_string(), self.lease_ttl.to_string()];
            let mut answer =
                self.run(&self.scripts.sweep, &args.each_ref().map(|it| it.as_str())).await?;
            let swept = Swept {
                abandoned: abandoned(&answer.texts()?)?,
                expired: answer.ended()?,
                undrained: answer.names()?,
                restored: answer.names()?,
            };
            if answer.flag()? {
                self.note_beginning(answer.number()?);
                if answer.flag()? {
                    self.audit_due.store(true, Ordering::Relaxed);
                    self.link.opened.notify_one();
                }
            } else {
                self.link.open_circuit();
            }
            Ok(swept)
        })
    }

    fn audit(&self) -> Reply<'_, Audited> {
        Box::pin(self.audit_all())
    }

    fn status(&self) -> Reply<'_, Status> {
        Box::pin(async move {
            let mut answer = self.run(&self.scripts.status, &[]).await?;
            let (active_calls, waiting) = (answer.number()? as usize, answer.number()? as usize);
            let tiers = tier_table::read(&answer.texts()?)?;
            let mut counts = BTreeMap::new();
            for row in answer.texts()?.chunks_exact(7) {
                let Ok(pool) = row[0].parse::<Pool>() else {
                    tracing::warn!(pool = row[0], "voice:pools holds what is no pool");
                    continue;
                };
                let mut numbers = [0; 6];
                for (number, text) in numbers.iter_mut().zip(&row[1..]) {
                    *number = reply::parse(text)?;
                }
                if numbers[0] > 0 || tiers.wants(&pool) {
                    counts.insert(pool, numbers);
                }
            }
            for (name, _) in tiers.iter() {
                counts
                    .entry(tiers.pool(name).expect("a tier of the table has a pool"))
                    .or_insert([0; 6]);
            }
            let pools =
                counts.into_iter().map(|(pool, counts)| self.status_of(pool, &tiers, counts));
            let pools = stream::iter(pools).buffered(POOLS_AT_ONCE).try_collect().await?;
            Ok(Status { pools, active_calls, waiting })
        })
    }

    fn tiers(&self) -> Reply<'_, Tiers> {
        Box::pin(async move {
            let mut answer = self.run(&self.scripts.status, &[]).await?;
            answer.number()?;
            answer.number()?;
            tier_table::read(&answer.texts()?)
        })
    }

    fn merchant<'a>(&'a self, id: &'a MerchantId) -> Reply<'a, Option<String>> {
        Box::pin(async move {
            let key = self.key(keys::MERCHANT_CONFIG);
            self.ask_fact(&key, redis::cmd("HGET").arg(&key).arg(id.as_str())).await
        })
    }

    fn pod<'a>(&'a self, pod: &'a PodName) -> Reply<'a, Option<PodStatus>> {
        Box::pin(async move {
            let mut answer = self.run(&self.scripts.pod, &[pod.as_str()]).await?;
            if answer.word == "unknown" {
                return Ok(None);
            }
            pod_row(Value::Array(answer.list()?)).map(Some)
        })
    }

    fn pods(&self) -> Reply<'_, Vec<PodStatus>> {
        Box::pin(self.all_pods())
    }

    fn call<'a>(&'a self, call: &'a CallSid) -> Reply<'a, Option<Found>> {
        Box::pin(async move {
            let mut answer = self.run(&self.scripts.call, &[call.as_str()]).await?;
            if answer.word == "not_found" {
                return Ok(None);
            }
            call_row(Value::Array(answer.list()?)).map(Some)
        })
    }

    fn calls<'a>(&'a self, query: &'a CallQuery) -> Reply<'a, CallPage> {
        Box::pin(self.some_calls(query))
    }

    fn merchants<'a>(
        &'a self,
        after: Option<&'a MerchantId>,
        most: usize,
    ) -> Reply<'a, Vec<(MerchantId, String)>> {
        Box::pin(self.some_merchants(after, most))
    }

    fn events_after(&self, id: EventId, most: usize) -> Reply<'_, Vec<Logged>> {
        Box::pin(self.events("XRANGE", [format!("({id}"), "+".into()], most))
    }

    fn events_before(&self, id: Option<EventId>, most: usize) -> Reply<'_, Vec<Logged>> {
        let from = id.map_or("+".into(), |id| format!("({id}"));
        Box::pin(self.events("XREVRANGE", [from, "-".into()], most))
    }

    fn handoffs(&self) -> &Notifier<CallSid> {
        &self.handoffs
    }

    fn drains(&self) -> &Notifier<PodName> {
        &self.drains
    }

    fn now(&self) -> Millis {
        self.link.clock.now().unwrap_or_else(wall_clock)
    }

    fn outage(&self) -> Option<String> {
        (!self.link.is_up()).then(|| self.link.reason())
    }

    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {
            self.stopping.cancel();
            self.tasks.wait().await;
        })
    }
}
