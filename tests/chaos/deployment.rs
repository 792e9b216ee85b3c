//! The deployment of a run: Redis, a fake cluster, three routers, and fault proxies in between.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Deref,
    sync::{
        Mutex, MutexGuard, RwLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use fleet::tiers::{DocumentSource, Tiers};
use serde_json::{Value, json};

use super::{
    cell::{Broken, Cell},
    history::{Action, Event, History},
    http::{self, Failure, Response},
    router_process::RouterProcess,
    store::Backend,
};
use testkit::{free_port, kube::FakeKube, proxy::FaultProxy, scratch};

pub(crate) const ROUTERS: usize = 3;
pub(crate) const TIERS: &str = r#"{"tiers": {"gold": {"target": 4}, "basic": {"type": "shared", "target": 2, "max_concurrent": 3}, "acme": {"target": 1}}, "default_chain": ["gold", "basic"]}"#;

/// The capacity of a pod, by its name.
pub(crate) fn cap(pod: &str) -> usize {
    if pod.starts_with("basic") { 3 } else { 1 }
}

/// A router process and its proxies.
pub(crate) struct RouterInstance {
    process: RouterProcess,
    pub redis_proxy: FaultProxy,
    pub kube_proxy: FaultProxy,
}

impl Deref for RouterInstance {
    type Target = RouterProcess;

    fn deref(&self) -> &RouterProcess {
        &self.process
    }
}

pub(crate) struct Deployment {
    pub history: History,
    pub kube: FakeKube,
    pub store: Mutex<Backend>,
    pub routers: Vec<RouterInstance>,
    /// The existing pods.
    pub pods: Mutex<Vec<String>>,
    pub is_finished: AtomicBool,
    /// Write-locked while Redis may lose acknowledged writes; afterwards the end of that time.
    pub unreplicated_until: RwLock<Duration>,
    pub settings: BTreeMap<&'static str, String>,
    /// The number of removed pods per name.
    generations: Mutex<BTreeMap<String, usize>>,
    /// Paused routers with the start and end of the pause.
    pub pauses: Mutex<Vec<(usize, Duration, Duration)>>,
    /// Crashed routers with the times of crash and restart.
    pub crashes: Mutex<Vec<(usize, Duration, Duration)>>,
    calls: AtomicUsize,
}

impl Deployment {
    /// The configured tiers.
    pub(crate) fn tiers(&self) -> Tiers {
        Tiers::parse(&self.settings["TIER_CONFIG"], DocumentSource::Settings)
            .expect("a tier table")
            .0
    }

    /// Turns a response into a failure if Redis may lose the acknowledged write. Waits until the
    /// time of possible loss has ended.
    pub(crate) fn filter_unreplicated(
        &self,
        sent_at: Duration,
        response: Result<Response, Failure>,
    ) -> Result<Response, Failure> {
        if self.unreplicated_until.try_read().is_ok_and(|until| *until <= sent_at) {
            return response;
        }
        drop(self.unreplicated_until.read());
        response.and(Err(Failure::Unreplicated))
    }

    /// Starts all parts and waits until they are ready for calls.
    pub(crate) fn start(cell: &'static Cell, broken: Option<Broken>) -> Result<Self, String> {
        let mut settings = defaults();
        settings.extend(cell.settings.iter().map(|(name, value)| (*name, value.to_string())));
        if let Some(Broken::Settings(more)) = broken {
            settings.extend(more.iter().map(|(name, value)| (*name, value.to_string())));
        }
        let is_sound =
            broken.is_none() && std::env::var_os("CHAOS_MIN_REPLICAS").is_none_or(|it| it != "off");
        let store = Backend::start(cell.backend, is_sound);
        let kube = FakeKube::start();
        let pods: Vec<String> =
            ["gold-0", "gold-1", "gold-2", "gold-3", "basic-0", "basic-1", "acme-0"]
                .map(str::to_owned)
                .into();
        for pod in &pods {
            add_pod(&kube, pod);
        }
        let routers = (0..ROUTERS)
            .map(|number| RouterInstance::new(number, cell.name, broken, &store, &kube, &settings))
            .collect();
        let deployment = Self {
            history: History::new(),
            kube,
            store: Mutex::new(store),
            routers,
            pods: Mutex::new(pods),
            is_finished: AtomicBool::new(false),
            unreplicated_until: RwLock::default(),
            settings,
            generations: Mutex::default(),
            pauses: Mutex::default(),
            crashes: Mutex::default(),
            calls: AtomicUsize::new(0),
        };
        if broken.is_some_and(|broken| broken.is_baseline()) {
            deployment.store().fill_pools(&deployment.pods());
        }
        for router in &deployment.routers {
            router.start();
        }
        let until = Instant::now() + Duration::from_secs(60);
        let is_up = || {
            // `is_alive` rules out another process on the same port.
            deployment.routers.iter().all(|router| router.is_alive() && router.is_ready())
                && (deployment.routers[0].is_baseline() || deployment.knows_all_pods())
        };
        while !is_up() {
            if Instant::now() > until {
                return Err("the routers did not become ready".into());
            }
            thread::sleep(Duration::from_millis(20));
        }
        if !deployment.routers[0].is_baseline() && !deployment.put_merchant() {
            return Err("the merchant could not be written".into());
        }
        Ok(deployment)
    }

    /// Writes the merchant document, at the start and after Redis has lost its data.
    fn put_merchant(&self) -> bool {
        let document = br#"{"pool": "acme"}"#;
        let path = "/api/v1/merchants/acme";
        let put = |router: &RouterInstance| {
            http::send(router.address, "PUT", path, "application/json", document)
        };
        let is_done =
            |router: &RouterInstance| put(router).is_ok_and(|response| response.status == 200);
        let until = Instant::now() + Duration::from_secs(15);
        loop {
            if self.routers.iter().any(is_done) {
                return true;
            }
            if Instant::now() > until {
                return false;
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn knows_all_pods(&self) -> bool {
        let Ok(response) = http::get(self.routers[0].address, "/api/v1/status") else {
            return false;
        };
        let status: Value = serde_json::from_str(&response.body).unwrap_or_default();
        let assigned =
            |group: &str, pool: &str| status[group][pool]["assigned"].as_u64().unwrap_or(0);
        assigned("pools", "gold") == 4
            && assigned("pools", "basic") == 2
            && assigned("merchants", "acme") == 1
    }

    pub(crate) fn store(&self) -> MutexGuard<'_, Backend> {
        self.store.lock().unwrap()
    }

    pub(crate) fn pods(&self) -> Vec<String> {
        self.pods.lock().unwrap().clone()
    }

    pub(crate) fn new_call(&self) -> String {
        format!("call-{}", self.calls.fetch_add(1, Ordering::Relaxed))
    }

    /// An unused pod name.
    pub(crate) fn new_pod(&self, tier: &str) -> String {
        format!("{tier}-{}", 1_000 + self.calls.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn setting(&self, name: &str) -> Duration {
        let text = &self.settings[name];
        let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap());
        let number: u64 = number.parse().unwrap();
        match unit {
            "ms" => Duration::from_millis(number),
            "s" => Duration::from_secs(number),
            "m" => Duration::from_secs(60 * number),
            _ => Duration::from_secs(3_600 * number),
        }
    }

    /// All pods with a drain request.
    pub(crate) fn drained(&self) -> BTreeSet<String> {
        let drained = |event: Event| match event.action {
            Action::Drain { pod, .. } => Some(pod),
            _ => None,
        };
        self.history.events().into_iter().filter_map(drained).collect()
    }

    /// The router that holds the leader lease.
    pub(crate) fn leader(&self) -> Option<usize> {
        let (holder, _) = self.kube.lease_holder()?;
        (0..ROUTERS).find(|number| holder.starts_with(&format!("router-{number}_")))
    }

    pub(crate) fn remove_pod(&self, pod: &str) {
        self.pods.lock().unwrap().retain(|other| other != pod);
        *self.generations.lock().unwrap().entry(pod.into()).or_default() += 1;
        self.history.record(self.history.now(), Action::PodRemoved { pod: pod.into() });
        self.kube.delete(pod);
    }

    pub(crate) fn add_pod(&self, pod: &str) {
        self.history.record(self.history.now(), Action::PodAdded { pod: pod.into() });
        add_pod(&self.kube, pod);
        self.pods.lock().unwrap().push(pod.into());
    }

    /// Distinguishes pods of the same name.
    pub(crate) fn generation(&self, pod: &str) -> usize {
        self.generations.lock().unwrap().get(pod).copied().unwrap_or(0)
    }

    /// Removes a pod without an event; the caller adds a new pod of the same name.
    pub(crate) fn remove_pod_quietly(&self, pod: &str) {
        self.pods.lock().unwrap().retain(|other| other != pod);
        *self.generations.lock().unwrap().entry(pod.into()).or_default() += 1;
        self.history.record(self.history.now(), Action::PodRemoved { pod: pod.into() });
    }

    /// Whether Redis replies only after disconnecting callers have gone.
    pub(crate) fn is_slow(&self) -> bool {
        self.routers.iter().all(|router| router.redis_proxy.has_latency())
    }

    pub(crate) fn set_ready(&self, pod: &str, is_ready: bool) {
        let status = if is_ready { "True" } else { "False" };
        self.kube.update(pod, |object| {
            object["status"]["conditions"] = json!([{"type": "Ready", "status": status}]);
        });
    }

    /// Records a crash of a router. Returns its index for [`Self::record_restart`].
    pub(crate) fn record_crash(&self, router: usize) -> usize {
        let mut crashes = self.crashes.lock().unwrap();
        crashes.push((router, self.history.now(), Duration::MAX));
        crashes.len() - 1
    }

    pub(crate) fn record_restart(&self, crash: usize) {
        self.crashes.lock().unwrap()[crash].2 = self.history.now();
    }

    /// Pauses or resumes a router. Callers send no requests to a paused router.
    pub(crate) fn pause(&self, router: usize, is_paused: bool) {
        let now = self.history.now();
        let mut pauses = self.pauses.lock().unwrap();
        if is_paused {
            pauses.push((router, now, Duration::MAX));
            self.routers[router].signal("STOP");
        } else {
            self.routers[router].signal("CONT");
            pauses.last_mut().unwrap().2 = now + Duration::from_millis(100);
        }
    }

    pub(crate) fn is_paused(&self, router: usize) -> bool {
        self.pauses
            .lock()
            .unwrap()
            .iter()
            .any(|(other, _, to)| *other == router && *to == Duration::MAX)
    }

    /// Removes all network faults and restarts crashed routers.
    pub(crate) fn heal(&self) {
        for router in &self.routers {
            router.redis_proxy.heal();
            router.kube_proxy.heal();
            if !router.is_alive() {
                router.start();
            }
        }
        self.history.fault("all faults are removed");
        if !self.routers[0].is_baseline() {
            self.put_merchant();
        }
    }
}

fn add_pod(kube: &FakeKube, pod: &str) {
    let tier = pod.split('-').next().unwrap();
    kube.add_with(pod, |object| {
        let label = if tier == "acme" { "smart-router/merchant" } else { "smart-router/tier" };
        object["metadata"]["labels"][label] = json!(tier);
    });
}

fn defaults() -> BTreeMap<&'static str, String> {
    [
        ("TIER_CONFIG", TIERS),
        ("VOICE_AGENT_BASE_URL", "wss://voice.example.com"),
        ("HTTP_BIND", "127.0.0.1"),
        ("LOG_LEVEL", "off"),
        ("LEASE_TTL", "20s"),
        ("DRAINING_TTL", "60s"),
        ("CLEANUP_INTERVAL", "30s"),
        ("RECONCILE_INTERVAL", "60s"),
        ("LEADER_ELECTION_DURATION", "1500ms"),
        ("LEADER_ELECTION_RENEW_DEADLINE", "1s"),
        ("LEADER_ELECTION_RETRY_PERIOD", "200ms"),
    ]
    .map(|(name, value)| (name, value.to_owned()))
    .into()
}

impl RouterInstance {
    fn new(
        number: usize,
        cell: &'static str,
        broken: Option<Broken>,
        store: &Backend,
        kube: &FakeKube,
        settings: &BTreeMap<&'static str, String>,
    ) -> Self {
        let (redis_proxy, kube_proxy) = (FaultProxy::to(store.port()), FaultProxy::to(kube.port));
        let config = scratch().join("kubeconfig");
        let text = std::fs::read_to_string(&kube.config).unwrap();
        let text = text.replace(&format!(":{}", kube.port), &format!(":{}", kube_proxy.port()));
        std::fs::write(&config, text).unwrap();
        let port = free_port();
        let mut all: Vec<(String, String)> =
            settings.iter().map(|(name, value)| (name.to_string(), value.clone())).collect();
        let url = store.url(redis_proxy.port(), broken);
        for (name, value) in [
            ("HTTP_PORT", port.to_string()),
            ("METRICS_PORT", port.to_string()),
            ("POD_NAME", format!("router-{number}")),
            ("KUBECONFIG", config.to_str().unwrap().to_owned()),
            ("REDIS_URL", url),
        ] {
            all.push((name.into(), value));
        }
        let process = RouterProcess::new(port, all, broken.map(|broken| (cell, broken)));
        Self { process, redis_proxy, kube_proxy }
    }
}

impl Drop for RouterInstance {
    fn drop(&mut self) {
        self.killer()();
        self.redis_proxy.heal();
        self.redis_proxy.reset_connections();
        self.kube_proxy.reset_connections();
    }
}
