//! Follows the pods of the cluster, for as long as we lead.
//!
//! All pods are listed again every now and then, by a watch that takes the place of
//! the one before when its list is whole; until then the one before is followed. The
//! new one may repeat what the old one has told: what is known to be over by its UID
//! is passed over.

use std::{
    collections::{HashMap, HashSet},
    convert::Infallible,
    pin::Pin,
    sync::atomic::Ordering,
    time::Duration,
};

use futures_util::{Stream, StreamExt, future::join_all};
use kube::runtime::watcher::{self, Event};
use tokio::time::{Instant, sleep_until};

use super::{
    Control,
    leader::{Halt, PAUSE},
    pods::AT_ONCE,
};
use crate::{
    cluster::{Cluster, ClusterPod, is_expired, pods::Seen},
    domain::{
        fleet::{Departure, PodFacts, PodStatus, PodWriter, Removed},
        names::PodName,
    },
    store::StoreError,
};

/// How long a list may make no progress.
const LIST: Duration = Duration::from_secs(30);
/// How long after a change of pods the pools are balanced.
const SETTLE: Duration = Duration::from_secs(1);

type Told = Result<Event<ClusterPod>, watcher::Error>;
type Events = Pin<Box<dyn Stream<Item = Vec<Told>> + Send>>;
type Changes = HashMap<PodName, Change>;

/// What became of a pod, by the last word on it.
#[derive(Debug)]
enum Change {
    Present(PodFacts),
    Gone {
        uid: String,
    },
    /// It is there, and nobody can tell what it is.
    Unreadable,
}

/// A watch whose list is not whole yet.
struct Fresh {
    events: Events,
    listed: Changes,
    /// When it is given up for want of progress.
    limit: Instant,
}

/// What is known while we lead.
#[derive(Default)]
struct Following {
    /// The watch that is followed.
    current: Option<Events>,
    fresh: Option<Fresh>,
    /// What the one that is followed has told since the fresh one began.
    touched: HashSet<PodName>,
    /// The UIDs that pods have, and those of pods that are no more: from this list
    /// on, and from the one before.
    uids: HashMap<PodName, String>,
    dead: [HashSet<String>; 2],
}

impl Following {
    fn begin(&mut self, cluster: &Cluster) {
        let events: Events = Box::pin(cluster.watch().ready_chunks(AT_ONCE));
        self.fresh = Some(Fresh { events, listed: Changes::new(), limit: Instant::now() + LIST });
        self.touched.clear();
    }

    fn is_dead(&self, uid: &str) -> bool {
        self.dead.iter().any(|dead| dead.contains(uid))
    }

    /// Whether an event is news.
    fn admit(&mut self, name: &PodName, change: &Change) -> bool {
        match change {
            Change::Unreadable => false,
            Change::Present(facts) if self.is_dead(&facts.uid) => false,
            Change::Present(facts) => {
                let before = self.uids.insert(name.clone(), facts.uid.clone());
                self.dead[0].extend(before.filter(|before| *before != facts.uid));
                true
            }
            Change::Gone { uid } => {
                if self.uids.get(name) == Some(uid) {
                    self.uids.remove(name);
                }
                !self.is_dead(uid) && self.dead[0].insert(uid.clone())
            }
        }
    }
}

/// The next events of a watch, if there is one.
async fn next(events: Option<&mut Events>) -> Vec<Told> {
    match events {
        Some(events) => events.next().await.unwrap_or_default(),
        None => std::future::pending().await,
    }
}

impl Control {
    /// Lists all pods, brings the store in line, and follows what becomes of them.
    /// Ends only by an error.
    pub(super) async fn follow_cluster(
        &self,
        cluster: &Cluster,
        writer: PodWriter<'_>,
        pause: &mut Duration,
    ) -> Result<Infallible, Halt> {
        let mut following = Following::default();
        following.begin(cluster);
        let mut again = Instant::now() + self.reconcile_interval;
        let mut balance: Option<Instant> = None;
        // Until when a watch that has failed is left alone: the fresh one, the other.
        let mut rest = [Instant::now(); 2];
        let mut said = String::new();
        loop {
            let is_rested = rest.map(|rest| rest <= Instant::now());
            let rested = rest.into_iter().filter(|rest| *rest > Instant::now()).min();
            let limit = following.fresh.as_ref().map_or(again, |fresh| fresh.limit);
            let (told, from) = tokio::select! {
                told = next(following.fresh.as_mut().map(|fresh| &mut fresh.events)), if is_rested[0] => {
                    (self.read_list(cluster, &mut following, told, writer).await?, 0)
                }
                told = next(following.current.as_mut()), if is_rested[1] => {
                    if told.iter().any(|event| matches!(event, Ok(Event::Init))) {
                        // It begins anew by itself: its list has to be compared, too.
                        let events = following.current.take().expect("it has just spoken");
                        following.begin(cluster);
                        following.fresh.as_mut().expect("it has just begun").events = events;
                        (self.read_list(cluster, &mut following, told, writer).await?, 0)
                    } else {
                        (told, 1)
                    }
                }
                () = sleep_until(rested.unwrap_or(again)), if rested.is_some() => continue,
                () = sleep_until(limit) => {
                    if following.fresh.is_some() {
                        tracing::warn!("the list of pods makes no progress; beginning anew");
                    }
                    following.begin(cluster);
                    continue;
                }
                () = self.nudge.notified() => {
                    following.begin(cluster);
                    continue;
                }
                () = sleep_until(balance.unwrap_or(again)), if balance.is_some() => {
                    balance = None;
                    let tiers = self.store.tiers().await?;
                    self.rebalance(&tiers, writer).await?;
                    continue;
                }
            };
            if following.fresh.is_none() && again <= Instant::now() {
                again = Instant::now() + self.reconcile_interval;
                *pause = PAUSE.0;
                said.clear();
                self.lifecycle.is_cluster_lost.store(false, Ordering::Relaxed);
            }
            let mut changes = Changes::new();
            for event in told {
                let change = match event {
                    Ok(Event::Apply(pod)) => self.read(cluster, &pod),
                    Ok(Event::Delete(pod)) => match (pod.shown_name().parse(), pod.uid()) {
                        (Ok(name), Some(uid)) => Some((name, Change::Gone { uid })),
                        _ => None,
                    },
                    Ok(Event::Init | Event::InitApply(_) | Event::InitDone) => None,
                    Err(error) => {
                        let is_over = is_expired(&error);
                        let error = cluster.explain_watch(&error);
                        if error != said {
                            tracing::warn!(
                                error,
                                "cannot follow the pods of the cluster; trying again"
                            );
                            said = error;
                            self.lifecycle.is_cluster_lost.store(true, Ordering::Relaxed);
                        }
                        if is_over || following.current.is_none() {
                            // What it would go on from is gone.
                            following.current = None;
                            following.begin(cluster);
                        }
                        rest[from] = Instant::now() + *pause;
                        *pause = (*pause * 2).min(PAUSE.1);
                        None
                    }
                };
                if let Some((name, change)) = change
                    && following.admit(&name, &change)
                {
                    following.touched.insert(name.clone());
                    changes.insert(name, change);
                }
            }
            if !changes.is_empty() {
                self.apply(changes, writer).await?;
                balance = balance.or_else(|| Some(Instant::now() + SETTLE));
            }
        }
    }

    /// Takes from a fresh watch what belongs to its list; when that is whole, the
    /// store is compared with it, and the watch is the one that is followed. Answers
    /// what is not part of the list.
    async fn read_list(
        &self,
        cluster: &Cluster,
        following: &mut Following,
        told: Vec<Told>,
        writer: PodWriter<'_>,
    ) -> Result<Vec<Told>, Halt> {
        let mut rest = Vec::new();
        for event in told {
            let Some(fresh) = &mut following.fresh else {
                rest.push(event);
                continue;
            };
            match event {
                Ok(Event::Init) => fresh.listed.clear(),
                Ok(Event::InitApply(pod)) => {
                    fresh.limit = Instant::now() + LIST;
                    fresh.listed.extend(self.read(cluster, &pod));
                }
                Ok(Event::InitDone) => {
                    let Fresh { events, listed, .. } =
                        following.fresh.take().expect("it has just spoken");
                    self.compare(listed, following, writer).await?;
                    self.metrics.compared();
                    following.current = Some(events);
                    following.dead.swap(0, 1);
                    following.dead[0].clear();
                }
                other => rest.push(other),
            }
        }
        Ok(rest)
    }

    /// What a pod of the cluster means; one that makes no sense is reported.
    fn read(&self, cluster: &Cluster, pod: &ClusterPod) -> Option<(PodName, Change)> {
        match pod.read(&cluster.config) {
            Ok(Seen::Present { name, facts, warnings }) => {
                for warning in warnings {
                    tracing::warn!(pod = %name, warning);
                }
                Some((name, Change::Present(facts)))
            }
            Ok(Seen::Finished { name, uid }) => Some((name, Change::Gone { uid })),
            Err(error) => {
                let pod = pod.shown_name();
                tracing::warn!(pod, error, "a pod that makes no sense is passed over");
                pod.parse().ok().map(|name| (name, Change::Unreadable))
            }
        }
    }

    /// Compares the pods of the store with those of a list, and then the pools with
    /// their targets. Pods of which there is news since the list began are left out:
    /// the watch will tell of them again.
    async fn compare(
        &self,
        listed: Changes,
        following: &mut Following,
        writer: PodWriter<'_>,
    ) -> Result<(), Halt> {
        let started = Instant::now();
        let tiers = self.store.tiers().await?;
        let known: HashMap<PodName, PodStatus> =
            self.store.pods().await?.into_iter().map(|pod| (pod.name.clone(), pod)).collect();
        let mut changes = Changes::new();
        for (name, pod) in &known {
            if !listed.contains_key(name) && !following.touched.contains(name) {
                changes.insert(name.clone(), Change::Gone { uid: pod.facts.uid.clone() });
            }
        }
        for (name, change) in listed {
            if following.touched.contains(&name) || !following.admit(&name, &change) {
                continue;
            }
            if let Change::Present(facts) = &change {
                let unknown = facts.pin.as_ref().filter(|pin| tiers.resolve(pin).is_none());
                if let Some(pin) = unknown {
                    tracing::warn!(pod = %name, %pin, "the pod's label names no tier; ignored");
                }
                if known.get(&name).is_some_and(|pod| pod.facts == *facts) {
                    continue;
                }
            }
            changes.insert(name, change);
        }
        let count = changes.len();
        self.apply(changes, writer).await?;
        self.rebalance(&tiers, writer).await?;
        self.lifecycle.store_reached();
        let took_ms = started.elapsed().as_millis() as u64;
        tracing::debug!(pods = known.len(), changes = count, took_ms, "compared with the cluster");
        Ok(())
    }

    /// Tells the store, pods by name so that those who come together get their
    /// pools in an order.
    async fn apply(&self, changes: Changes, writer: PodWriter<'_>) -> Result<(), Halt> {
        let mut changes: Vec<_> = changes.into_iter().collect();
        changes.sort_by(|(a, _), (b, _)| a.cmp(b));
        for some in changes.chunks(AT_ONCE) {
            let told =
                join_all(some.iter().map(|(name, change)| self.tell(name, change, writer))).await;
            for fenced in told {
                if fenced? {
                    return Err(Halt::Fenced);
                }
            }
        }
        Ok(())
    }

    /// Tells the store of one pod; answers whether we were fenced off.
    async fn tell(
        &self,
        name: &PodName,
        change: &Change,
        writer: PodWriter<'_>,
    ) -> Result<bool, StoreError> {
        let uid = match change {
            Change::Present(facts) => return self.observe(name, facts, writer).await,
            Change::Unreadable => return Ok(false),
            Change::Gone { uid } => uid,
        };
        match self.forget(name, uid, Departure::Now, writer).await? {
            Err(_) => Ok(true),
            Ok(Removed::NotThere) => {
                // The cluster has no pod of that name; the store may have one from
                // before.
                let Some(pod) = self.store.pod(name).await? else { return Ok(false) };
                let gone = self.forget(name, &pod.facts.uid, Departure::Now, writer).await?;
                Ok(gone.is_err())
            }
            Ok(Removed::Gone { .. } | Removed::Busy) => Ok(false),
        }
    }
}
