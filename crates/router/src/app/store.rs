//! The store at start-up, and the claim of its pods.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use tokio::{sync::Notify, time::timeout};

use super::STARTUP_TIMEOUT;
use crate::{
    cluster::{Cluster, FORBIDDEN_GRACE, PodView},
    config::{Config, PodSource, ProcessRole, StoreConfig},
    control::{Control, ListFile, PodFeed, Reconciled, Source, explain_foreign},
    telemetry::metrics::Metrics,
};
use fleet::{Claimant, PodOrigin};
use store::{Embedded, Functions, MIGRATION_QUIET_PERIOD, Redis, RedisConfig, Store, Unusable};

/// Opens the store. `origin` is that of this process's pods; `None` if it has none and takes the
/// store as routers have set it up.
pub(super) async fn open_store(
    config: &Config,
    origin: Option<PodOrigin>,
    metrics: &Metrics,
    reconcile_now: &Arc<Notify>,
    functions: Functions,
) -> anyhow::Result<Arc<dyn Store>> {
    let (tiers, lease, metrics) = (config.tiers.clone(), config.ttls.lease, metrics.store.clone());
    match &config.store {
        StoreConfig::Memory => {
            tracing::warn!(
                "calls are held in memory only and lost at a restart: set DATA_DIR or REDIS_URL"
            );
            let store = Embedded::in_memory(tiers, lease, metrics);
            store.set_event_limit(config.events);
            Ok(Arc::new(store))
        }
        StoreConfig::Journal(path) => {
            let store = Embedded::open(path, tiers, lease, metrics);
            let store = store.with_context(|| format!("DATA_DIR={}", path.display()))?;
            store.set_event_limit(config.events);
            Ok(Arc::new(store))
        }
        StoreConfig::Redis { url, key_prefix, ca_file } => {
            let read = |path: &PathBuf| {
                std::fs::read(path).with_context(|| format!("REDIS_CA_FILE={}", path.display()))
            };
            let authority = ca_file.as_ref().map(read).transpose()?;
            let (url, key_prefix, ttls) = (url.clone(), key_prefix.clone(), config.ttls);
            let reconcile_now = reconcile_now.clone();
            let origin_key = origin_key(&config.store);
            let is_router = config.role == ProcessRole::Router;
            let force_origin = config.force_pod_origin && is_router;
            let config = RedisConfig {
                url,
                key_prefix,
                authority,
                ttls,
                tiers,
                reconcile_now,
                metrics,
                functions,
                migration_quiet_period: MIGRATION_QUIET_PERIOD,
                origin: origin.clone(),
                force_origin,
                may_set_up: is_router,
            };
            let redis =
                Redis::start(config).map_err(|error| anyhow::anyhow!("REDIS_URL: {error}"))?;
            redis.wait_until_available(STARTUP_TIMEOUT).await.map_err(
                |unusable| match unusable {
                    Unusable::Foreign(owner) => {
                        let origin = origin.expect("a store is foreign to an origin");
                        foreign_error(&explain_foreign(&owner, &origin_key, &origin))
                    }
                    Unusable::Other(error) => anyhow::anyhow!("REDIS_URL: {error}"),
                },
            )?;
            Ok(redis)
        }
    }
}

/// Claims the pods of the store, and reconciles them with a list of pods. A store whose pods
/// have another origin stops the start. Returns whether it has claimed the store for a list.
pub(super) async fn claim_pods(control: &Control, source: &Source) -> anyhow::Result<bool> {
    let mut is_claimed = false;
    let refused = match source {
        Source::Feed(feed) => match control.claim_list(feed, true).await {
            Ok(Ok(epoch)) => {
                is_claimed = true;
                // Pods of a short list serve the first call. A long one takes its time: the calls of
                // other replicas go on, and probes expect an answer.
                match timeout(STARTUP_TIMEOUT, control.reconcile_claimed(feed, epoch)).await {
                    Ok(Ok(Reconciled::Refused(refused))) => Ok(Some(refused)),
                    Ok(Ok(Reconciled::Done { .. })) => Ok(None),
                    Ok(Err(error)) => Err(error),
                    Err(_) => {
                        tracing::info!("serving while the pods of the store are reconciled");
                        Ok(None)
                    }
                }
            }
            Ok(Err(refused)) => Ok(Some(refused)),
            Err(error) => Err(error),
        },
        Source::Routers => Ok(None),
        Source::Cluster { .. } if control.origin.get().is_none() => Ok(None),
        Source::Cluster { .. } => {
            control.claim(Claimant::Leader { epoch: None }).await.map(Result::err)
        }
    };
    match refused {
        Ok(None) => {}
        Ok(Some(refused)) => return Err(foreign_error(&control.explain(&refused))),
        Err(error) => {
            tracing::error!(%error, "starting without the store; not ready until it answers");
        }
    }
    Ok(is_claimed)
}

/// The key that records the origin of pods, for messages: ` (voice:origin)` in Redis.
pub(super) fn origin_key(store: &StoreConfig) -> String {
    match store {
        StoreConfig::Redis { key_prefix, .. } => format!(" ({key_prefix}origin)"),
        StoreConfig::Memory | StoreConfig::Journal(_) => String::new(),
    }
}

fn foreign_error(explained: &str) -> anyhow::Error {
    anyhow::anyhow!("FORCE_POD_ORIGIN=off: {explained}")
}

pub(super) async fn log_warnings(config: &Config, store: &dyn Store) {
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    if config.role == ProcessRole::Router
        && store
            .tiers()
            .await
            .is_ok_and(|tiers| tiers != config.tiers && tiers.managed_by().is_none())
    {
        tracing::warn!(
            "the tiers in the store differ from TIER_CONFIG and are used; change them with PUT /api/v1/tiers"
        );
    }
}

/// Returns the origin of the pods; `None` while the cluster does not answer.
pub(super) async fn identify(
    config: &Config,
    source: &Source,
) -> anyhow::Result<Option<PodOrigin>> {
    let Source::Cluster { cluster, .. } = source else { return Ok(config.pods.origin()) };
    let started = Instant::now();
    let reason = loop {
        match timeout(STARTUP_TIMEOUT, cluster.namespace_uid()).await {
            Ok(Ok(uid)) => return Ok(Some(cluster.origin(uid))),
            Ok(Err(error)) => match cluster.explain_identity(&error) {
                (_, true) if started.elapsed() < FORBIDDEN_GRACE => {
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
                // Without the UID, this router could take over a store of another cluster.
                (reason, true) => anyhow::bail!("cannot identify the cluster: {reason}"),
                (reason, false) => break reason,
            },
            Err(_) => break "no answer in time".into(),
        }
    };
    tracing::error!(reason, "cannot identify the cluster; writing no pods until it answers");
    Ok(None)
}

pub(super) async fn pod_source(config: &Config) -> anyhow::Result<Source> {
    Ok(Source::Feed(match &config.pods {
        PodSource::List(pods) => PodFeed::Fixed(Arc::new(pods.clone())),
        PodSource::File(path) => {
            let file = ListFile::open(path.clone(), config.agent_port);
            PodFeed::File(file.map_err(|expected| {
                anyhow::anyhow!("PODS_FILE={}: expected {expected}", path.display())
            })?)
        }
        PodSource::Simulated => PodFeed::Simulated,
        PodSource::Routers => return Ok(Source::Routers),
        PodSource::Cluster(cluster) => {
            return Ok(Source::Cluster {
                cluster: Cluster::find(cluster.clone()).await?,
                view: Arc::new(PodView::new(cluster.namespaces.clone())),
                leader: config.leader.clone(),
                // Replicas that share a name must still have distinct identities.
                identity: format!("{}_{:08x}", config.identity, crate::random_u32()),
            });
        }
    }))
}
