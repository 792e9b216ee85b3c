//! The store that replicas share: one Lua script per operation over the
//! documented keys of a Redis.

mod address;
mod kept;
mod link;
mod reply;
mod scripts;
mod setup;
mod table;

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use redis::Value;
use tokio::sync::Notify;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use self::scripts::Scripts;
use self::{
    address::Address,
    kept::{Debt, Kept},
    link::{Failure, Link, Timeliness},
    reply::{Reply as Answer, pod_row},
    scripts::Script,
};
use super::{Reply, Store, StoreError};
use crate::{
    config::Ttls,
    domain::{
        Millis,
        assign::Stock,
        fleet::{
            Allocate, Allocation, Audited, CallNotFound, CallStatus, Departure, Drained, Fenced,
            MoveRefused, Observed, PodFacts, PodStatus, PoolStatus, Refusal, Release, Released,
            Removed, Renew, Renewed, Status, Swept, Undrained, UnknownPod,
        },
        merchant::{Malformed, Step},
        names::{CallSid, MerchantId, PodName, Pool},
        tiers::Tiers,
    },
    metrics::StoreMetrics,
};

/// Calls or members that one script looks at.
const BATCH: &str = "100";
/// Pods that one script places again.
const BATCH_OF_PODS: usize = 50;
/// Calls that one renewal may name.
const RENEWALS: usize = 500;

/// What a Redis store is told at the start.
pub struct RedisConfig {
    pub url: String,
    pub key_prefix: String,
    /// A certificate authority to trust besides the system's (PEM).
    pub authority: Option<Vec<u8>>,
    pub ttls: Ttls,
    /// The tiers of a store that has none.
    pub tiers: Tiers,
    /// Told when pods have to be compared at once.
    pub nudge: Arc<Notify>,
    pub metrics: StoreMetrics,
    pub scripts: Scripts,
}

/// A Redis, shared with other replicas.
pub struct Redis {
    link: Link,
    scripts: Scripts,
    prefix: String,
    lease_ttl: Millis,
    draining_ttl: Millis,
    /// How long the record of a call lives, counted from its last renewal.
    record_ttl: Millis,
    /// The tiers in force, and the document they were read from.
    tiers: RwLock<(Tiers, String)>,
    kept: Mutex<Kept>,
    /// Why this Redis is not for us, if it is not.
    refused: OnceLock<String>,
    nudge: Arc<Notify>,
    process: u32,
    attempts: AtomicU64,
    stopping: CancellationToken,
    tasks: TaskTracker,
}

impl Redis {
    /// Connects in the background: a router starts without its Redis, too.
    pub fn start(config: RedisConfig) -> Result<Arc<Self>, String> {
        let address = Address::parse(&config.url, config.authority)?;
        // Fails only where a provider is installed already, which is as good.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let store = Arc::new(Self {
            link: Link::new(address, &config.key_prefix, config.metrics),
            scripts: config.scripts,
            prefix: config.key_prefix,
            lease_ttl: config.ttls.lease,
            draining_ttl: config.ttls.draining,
            record_ttl: config.ttls.call_info.max(config.ttls.lease),
            tiers: RwLock::new((config.tiers, String::new())),
            kept: Mutex::default(),
            refused: OnceLock::new(),
            nudge: config.nudge,
            process: crate::random_u32(),
            attempts: AtomicU64::new(0),
            stopping: CancellationToken::new(),
            tasks: TaskTracker::new(),
        });
        store.tasks.spawn(store.clone().tend());
        store.tasks.close();
        Ok(store)
    }

    /// Waits until Redis is in use, for so long. An error is one that waiting
    /// does not mend.
    pub async fn first_contact(&self, patience: Duration) -> Result<(), String> {
        let until = tokio::time::Instant::now() + patience;
        while !self.link.is_up() && tokio::time::Instant::now() < until {
            if let Some(refused) = self.refused.get() {
                return Err(refused.clone());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// Runs a script that must be done while its caller waits.
    async fn run(&self, script: &Script, args: &[&str]) -> Result<Answer, StoreError> {
        let answer = self.link.run(script, args, Timeliness::InTime).await?;
        self.found(answer)
    }

    /// A store that is empty has to be set up again before anything else.
    fn found(&self, answer: Answer) -> Result<Answer, StoreError> {
        if answer.word == "lost" {
            self.link.open_circuit();
            return Err(StoreError::Unavailable("Redis is empty and being set up".into()));
        }
        Ok(answer)
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All pods, page by page. A pod that moves meanwhile may come twice.
    async fn all_pods(&self) -> Result<Vec<PodStatus>, StoreError> {
        let mut pods = std::collections::BTreeMap::new();
        let mut cursor = "0".to_owned();
        loop {
            let mut answer = self.run(&self.scripts.pods, &[&cursor, "200"]).await?;
            cursor = answer.text()?;
            for row in answer.list()? {
                let pod = pod_row(row)?;
                pods.insert(pod.name.clone(), pod);
            }
            if cursor == "0" {
                return Ok(pods.into_values().collect());
            }
        }
    }

    async fn status_of(
        &self,
        pool: Pool,
        tiers: &Tiers,
        counts: [u64; 4],
    ) -> Result<PoolStatus, StoreError> {
        let [assigned, available, draining, not_ready] = counts.map(|count| count as usize);
        let (mut active_calls, mut free_slots) = (0, 0);
        let mut cursor = (assigned > 0).then(|| "0".to_owned());
        while let Some(from) = cursor {
            let args = [&pool.as_tier_value(), from.as_str(), "200"];
            let mut answer = self.run(&self.scripts.pool_load, &args).await?;
            cursor = Some(answer.text()?).filter(|next| next != "0");
            active_calls += answer.number()? as usize;
            free_slots += answer.number()? as usize;
        }
        Ok(PoolStatus {
            kind: tiers.kind(&pool),
            target: tiers.target(&pool),
            assigned,
            available,
            draining,
            not_ready,
            active_calls,
            free_slots,
            pool,
        })
    }

    /// Runs one step of an audit: where to go on, and what it saw.
    async fn audit_step(
        &self,
        script: &Script,
        args: &[&str],
    ) -> Result<(String, Audited), StoreError> {
        let mut answer = self.link.attempt(script, args, Timeliness::InTime).await?;
        let (cursor, pods, repaired) = (answer.text()?, answer.number()? as usize, answer.texts()?);
        for name in &repaired {
            tracing::warn!(script = script.name, name, "the audit repaired a view");
        }
        Ok((cursor, Audited { pods, repaired: repaired.len() }))
    }

    /// Walks one scan of an audit to its end; how much it repaired.
    async fn audit_scan(&self, script: &Script, what: &[&str]) -> Result<usize, StoreError> {
        let mut repaired = 0;
        let mut cursor = "0".to_owned();
        loop {
            let args: Vec<&str> = what.iter().copied().chain([cursor.as_str(), BATCH]).collect();
            let audited;
            (cursor, audited) = self.audit_step(script, &args).await?;
            repaired += audited.repaired;
            if cursor == "0" {
                return Ok(repaired);
            }
        }
    }

    async fn audit_all(&self) -> Result<Audited, StoreError> {
        let draining_ttl = self.draining_ttl.to_string();
        let mut all = Audited::default();
        // By name, so that pods which need another pool get it in an order.
        for some in self.pod_names().await?.chunks(BATCH_OF_PODS) {
            let args: Vec<&str> = std::iter::once(draining_ttl.as_str())
                .chain(some.iter().map(String::as_str))
                .collect();
            let (_, audited) = self.audit_step(&self.scripts.audit_pods, &args).await?;
            all.pods += audited.pods;
            all.repaired += audited.repaired;
        }
        let pools: Vec<String> =
            self.command(redis::cmd("SMEMBERS").arg(self.key("pools"))).await?;
        for pool in &pools {
            for view in ["available", "assigned", "out"] {
                all.repaired += self.audit_scan(&self.scripts.audit_pool, &[pool, view]).await?;
            }
        }
        all.repaired += self.audit_scan(&self.scripts.audit_calls, &[]).await?;
        Ok(all)
    }

    /// The names of all pods, in order.
    async fn pod_names(&self) -> Result<Vec<String>, StoreError> {
        let mut names = std::collections::BTreeSet::new();
        let mut cursor = 0u64;
        loop {
            let mut scan = redis::cmd("HSCAN");
            scan.arg(self.key("pod:metadata")).arg(cursor).arg("COUNT").arg(500);
            let (next, pairs): (u64, Vec<String>) = self.command(&scan).await?;
            names.extend(pairs.into_iter().step_by(2));
            cursor = next;
            if cursor == 0 {
                return Ok(names.into_iter().collect());
            }
        }
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Owes Redis something, and sees to it that it is done soon.
    fn owe(&self, debt: Debt) {
        self.kept().push(debt);
        self.link.opened.notify_one();
    }

    /// A plain command for a request: at once refused while Redis is out.
    async fn ask<T: redis::FromRedisValue>(&self, command: &redis::Cmd) -> Result<T, StoreError> {
        if !self.link.is_up() {
            return Err(StoreError::Unavailable("Redis is out".into()));
        }
        self.command(command).await
    }

    /// A plain command, off the path of calls.
    async fn command<T: redis::FromRedisValue>(
        &self,
        command: &redis::Cmd,
    ) -> Result<T, StoreError> {
        self.link.command(command).await.map_err(|error| StoreError::Unavailable(error.to_string()))
    }
}

fn epoch_text(epoch: Option<u64>) -> String {
    epoch.map(|epoch| epoch.to_string()).unwrap_or_default()
}

fn flag(flag: bool) -> &'static str {
    if flag { "1" } else { "0" }
}

fn unexpected(answer: &Answer) -> StoreError {
    StoreError::Failed(format!("the store answered {:?}, which nobody expects", answer.word))
}

fn fenced(answer: &mut Answer, epoch: Option<u64>) -> Result<Fenced, StoreError> {
    Ok(Fenced { epoch: epoch.unwrap_or_default(), current: answer.number()? })
}

fn malformed(text: String) -> Option<Malformed> {
    (!text.is_empty()).then(|| Malformed::new(text))
}

impl Store for Redis {
    fn allocate<'a>(&'a self, request: &'a Allocate) -> Reply<'a, Result<Allocation, Refusal>> {
        Box::pin(async move {
            let attempt =
                format!("{:08x}-{}", self.process, self.attempts.fetch_add(1, Ordering::Relaxed));
            let merchant = request.merchant.as_ref().map_or("", |merchant| merchant.as_str());
            let (lease, life) =
                (request.lease_ttl.to_string(), self.record_ttl.max(request.lease_ttl).to_string());
            let args = [request.call.as_str(), merchant, &lease, &life, &attempt];
            let answer =
                match self.link.run(&self.scripts.allocate, &args, Timeliness::InTime).await {
                    Ok(answer) => self.found(answer),
                    Err(Failure::Unknown(error)) => {
                        // It may have happened, and nobody will be told: take it back.
                        self.owe(Debt::Doubt { call: request.call.clone(), attempt });
                        Err(error)
                    }
                    Err(Failure::NotRun(error)) => Err(error),
                };
            let mut answer = answer?;
            Ok(match answer.word.as_str() {
                "refused" => Err(Refusal {
                    tried: answer.tried()?,
                    malformed_merchant: malformed(answer.text()?),
                }),
                "new" | "existing" => Ok(Allocation {
                    was_existing: answer.word == "existing",
                    pod: answer.parse()?,
                    pool: answer.parse()?,
                    tried: answer.tried()?,
                    malformed_merchant: if answer.word == "new" {
                        malformed(answer.text()?)
                    } else {
                        None
                    },
                }),
                _ => return Err(unexpected(&answer)),
            })
        })
    }

    fn release<'a>(&'a self, request: &'a Release) -> Reply<'a, Result<Released, CallNotFound>> {
        Box::pin(async move {
            let pod = request.pod.as_ref().map_or("", |pod| pod.as_str());
            let args = [request.call.as_str(), pod, ""];
            let answer = self.link.run(&self.scripts.release, &args, Timeliness::Whenever).await;
            let mut answer = match answer.map_err(StoreError::from) {
                Ok(answer) => answer,
                Err(error) => {
                    if matches!(error, StoreError::Unavailable(_)) {
                        self.owe(Debt::Release(request.clone()));
                    }
                    return Err(error);
                }
            };
            match answer.word.as_str() {
                "not_found" => Ok(Err(CallNotFound)),
                "released" => Ok(Ok(Released {
                    pod: answer.parse()?,
                    source_pool: answer.parse()?,
                    pool: answer.parse()?,
                    was_draining: answer.flag()?,
                    lasted: answer.number()?,
                })),
                _ => Err(unexpected(&answer)),
            }
        })
    }

    fn renew<'a>(&'a self, request: &'a Renew) -> Reply<'a, Renewed> {
        Box::pin(async move {
            let pod = request.pod.as_ref().map_or("", |pod| pod.as_str());
            let (lease, life) =
                (request.lease_ttl.to_string(), self.record_ttl.max(request.lease_ttl).to_string());
            let mut renewed = Renewed::default();
            for some in request.calls.chunks(RENEWALS) {
                let mut args = vec![lease.as_str(), &life, pod];
                args.extend(some.iter().map(CallSid::as_str));
                let mut answer = self.run(&self.scripts.renew, &args).await?;
                renewed.until = answer.number()?;
                renewed.unknown.extend(answer.names()?);
                renewed.adopted.extend(answer.names()?);
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
                is_terminating: answer.flag()?,
                pool: answer.parse_some()?,
            }))
        })
    }

    fn observe_pod<'a>(
        &'a self,
        pod: &'a PodName,
        facts: &'a PodFacts,
        epoch: Option<u64>,
    ) -> Reply<'a, Result<Observed, Fenced>> {
        Box::pin(async move {
            let pin = facts.pin.as_ref().map(Step::to_string).unwrap_or_default();
            let (epoch_text, restarts) = (epoch_text(epoch), facts.restarts.to_string());
            let args = [
                &epoch_text,
                pod.as_str(),
                &facts.uid,
                &facts.address,
                flag(facts.ready),
                flag(facts.terminating),
                &restarts,
                &pin,
            ];
            let mut answer = self.run(&self.scripts.observe_pod, &args).await?;
            match answer.word.as_str() {
                "fenced" => Ok(Err(fenced(&mut answer, epoch)?)),
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
        epoch: Option<u64>,
    ) -> Reply<'a, Result<Removed, Fenced>> {
        Box::pin(async move {
            let departure = match departure {
                Departure::Now => "now",
                Departure::WhenIdle => "when_idle",
            };
            let args = [&epoch_text(epoch), pod.as_str(), uid, departure];
            let mut answer = self.run(&self.scripts.remove_pod, &args).await?;
            Ok(Ok(match answer.word.as_str() {
                "fenced" => return Ok(Err(fenced(&mut answer, epoch)?)),
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
        epoch: Option<u64>,
    ) -> Reply<'a, Result<(), MoveRefused>> {
        Box::pin(async move {
            let args = [&epoch_text(epoch), pod.as_str(), uid, &to.as_tier_value()];
            let mut answer = self.run(&self.scripts.move_pod, &args).await?;
            Ok(match answer.word.as_str() {
                "moved" => Ok(()),
                "fenced" => Err(MoveRefused::Fenced(fenced(&mut answer, epoch)?)),
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
        epoch: Option<u64>,
    ) -> Reply<'a, Result<(), Fenced>> {
        Box::pin(async move {
            let document = serde_json::Value::from(tiers.clone()).to_string();
            self.put_tiers(tiers, &document, epoch).await
        })
    }

    fn set_merchant<'a>(&'a self, id: &'a MerchantId, document: Option<&'a str>) -> Reply<'a, ()> {
        Box::pin(async move {
            let key = self.key("merchant:config");
            match document {
                Some(document) => {
                    self.ask(redis::cmd("HSET").arg(key).arg(id.as_str()).arg(document)).await
                }
                None => self.ask(redis::cmd("HDEL").arg(key).arg(id.as_str())).await,
            }
        })
    }

    fn sweep(&self, most: usize) -> Reply<'_, Swept> {
        Box::pin(async move {
            let mut answer = self.run(&self.scripts.sweep, &[&most.to_string()]).await?;
            let swept = Swept { expired: answer.ended()?, undrained: answer.names()? };
            if !answer.flag()? {
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
            let active_calls = answer.number()? as usize;
            let tiers = table::read(&answer.texts()?)?;
            let mut counts = std::collections::BTreeMap::new();
            for row in answer.texts()?.chunks_exact(5) {
                let pool: Pool = reply::parse(&row[0])?;
                let numbers = [
                    reply::parse(&row[1])?,
                    reply::parse(&row[2])?,
                    reply::parse(&row[3])?,
                    reply::parse(&row[4])?,
                ];
                if numbers[0] > 0 {
                    counts.insert(pool, numbers);
                }
            }
            for (name, _) in tiers.iter() {
                counts
                    .entry(tiers.pool(name).expect("a tier of the table has a pool"))
                    .or_insert([0; 4]);
            }
            let mut pools = Vec::new();
            for (pool, counts) in counts {
                pools.push(self.status_of(pool, &tiers, counts).await?);
            }
            Ok(Status { pools, active_calls })
        })
    }

    fn tiers(&self) -> Reply<'_, Tiers> {
        Box::pin(async move {
            let mut answer = self.run(&self.scripts.status, &[]).await?;
            answer.number()?;
            table::read(&answer.texts()?)
        })
    }

    fn merchant<'a>(&'a self, id: &'a MerchantId) -> Reply<'a, Option<String>> {
        Box::pin(async move {
            let key = self.key("merchant:config");
            self.ask(redis::cmd("HGET").arg(key).arg(id.as_str())).await
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

    fn call<'a>(&'a self, call: &'a CallSid) -> Reply<'a, Option<CallStatus>> {
        Box::pin(async move {
            let mut answer = self.run(&self.scripts.call, &[call.as_str()]).await?;
            if answer.word == "not_found" {
                return Ok(None);
            }
            Ok(Some(CallStatus {
                call: call.clone(),
                pod: answer.parse()?,
                source_pool: answer.parse()?,
                merchant: answer.parse_some()?,
                allocated_at: answer.number()?,
                lease_until: reply::millis(&answer.text()?)?,
                tried: answer.tried()?,
            }))
        })
    }

    fn stocks(&self) -> Reply<'_, Vec<Stock>> {
        Box::pin(async move {
            let (tiers, pods) = (self.tiers().await?, self.all_pods().await?);
            let stock = |pool: Pool| {
                let members = || pods.iter().filter(|pod| pod.pool.as_ref() == Some(&pool));
                let movable = members().filter(|pod| is_movable(pod, &tiers)).count();
                Stock { assigned: members().count(), movable, pool: pool.clone() }
            };
            Ok(tiers.chain_pools().map(stock).collect())
        })
    }

    fn movable_pods<'a>(
        &'a self,
        pool: &'a Pool,
        most: usize,
    ) -> Reply<'a, Vec<(PodName, String)>> {
        Box::pin(async move {
            let (tiers, pods) = (self.tiers().await?, self.all_pods().await?);
            let movable = pods
                .into_iter()
                .filter(|pod| pod.pool.as_ref() == Some(pool) && is_movable(pod, &tiers));
            Ok(movable.take(most).map(|pod| (pod.name, pod.facts.uid)).collect())
        })
    }

    fn is_up(&self) -> bool {
        self.link.is_up()
    }

    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {
            self.stopping.cancel();
            self.tasks.wait().await;
        })
    }
}

fn is_movable(pod: &PodStatus, tiers: &Tiers) -> bool {
    let is_pinned = pod.facts.pin.as_ref().is_some_and(|pin| tiers.resolve(pin).is_some());
    pod.calls.is_empty() && pod.facts.ready && !pod.is_leaving() && !is_pinned
}
