//! The parts of a run: a Redis, a cluster, three routers, and the lines between them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    net::SocketAddr,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, RwLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use fleet::tiers::{Origin, Tiers};
use serde_json::{Value, json};

use super::{
    cell::{Broken, Cell},
    history::{Event, History, What},
    http::{self, Answer, Failure},
    store::Backend,
};
use testkit::{free_port, kube::Kube, proxy::Proxy, scratch};

pub(crate) const ROUTERS: usize = 3;
pub(crate) const TIERS: &str = r#"{"tiers": {"gold": {"target": 4}, "basic": {"type": "shared", "target": 2, "max_concurrent": 3}, "acme": {"target": 1}}, "default_chain": ["gold", "basic"]}"#;

/// How many calls a pod of such a name may carry.
pub(crate) fn cap(pod: &str) -> usize {
    if pod.starts_with("basic") { 3 } else { 1 }
}

/// A router, dead or alive, and its lines.
pub(crate) struct Seat {
    pub address: SocketAddr,
    pub to_redis: Proxy,
    pub to_kube: Proxy,
    child: Arc<Mutex<Option<Child>>>,
    settings: Vec<(String, String)>,
    broken: Option<(&'static str, Broken)>,
}

/// Routers, a store, a cluster, and the network between them.
pub(crate) struct Deployment {
    pub history: History,
    pub kube: Kube,
    pub store: Mutex<Backend>,
    pub seats: Vec<Seat>,
    /// The pods there are.
    pub pods: Mutex<Vec<String>>,
    pub is_over: AtomicBool,
    /// Held while Redis may forget what it acknowledges; until when it last did.
    pub doubt: RwLock<Duration>,
    pub settings: BTreeMap<&'static str, String>,
    /// How often a pod of a name has come or gone.
    generations: Mutex<BTreeMap<String, usize>>,
    /// Which router slept, from when to when.
    pub pauses: Mutex<Vec<(usize, Duration, Duration)>>,
    /// Which router was dead, from when to when.
    pub deaths: Mutex<Vec<(usize, Duration, Duration)>>,
    calls: AtomicUsize,
}

impl Deployment {
    /// The tiers that all routers begin with.
    pub(crate) fn tiers(&self) -> Tiers {
        Tiers::parse(&self.settings["TIER_CONFIG"], Origin::Settings).expect("a tier table").0
    }

    /// What a caller who asked at that time hears of an answer: of one that Redis may forget,
    /// nothing, when it is over.
    pub(crate) fn heard(
        &self,
        asked: Duration,
        answer: Result<Answer, Failure>,
    ) -> Result<Answer, Failure> {
        if self.doubt.try_read().is_ok_and(|until| *until <= asked) {
            return answer;
        }
        drop(self.doubt.read());
        answer.and(Err(Failure::Unheard))
    }

    /// Everything, ready for calls; or why it does not come up.
    pub(crate) fn start(cell: &'static Cell, broken: Option<Broken>) -> Result<Self, String> {
        let mut settings = defaults();
        settings.extend(cell.settings.iter().map(|(name, value)| (*name, value.to_string())));
        if let Some(Broken::Settings(more)) = broken {
            settings.extend(more.iter().map(|(name, value)| (*name, value.to_string())));
        }
        let is_sound =
            broken.is_none() && std::env::var_os("CHAOS_MIN_REPLICAS").is_none_or(|it| it != "off");
        let store = Backend::start(cell.backend, is_sound);
        let kube = Kube::start();
        let pods: Vec<String> =
            ["gold-0", "gold-1", "gold-2", "gold-3", "basic-0", "basic-1", "acme-0"]
                .map(str::to_owned)
                .into();
        for pod in &pods {
            add_pod(&kube, pod);
        }
        let seats = (0..ROUTERS)
            .map(|number| Seat::new(number, cell.name, broken, &store, &kube, &settings))
            .collect();
        let deployment = Self {
            history: History::new(),
            kube,
            store: Mutex::new(store),
            seats,
            pods: Mutex::new(pods),
            is_over: AtomicBool::new(false),
            doubt: RwLock::default(),
            settings,
            generations: Mutex::default(),
            pauses: Mutex::default(),
            deaths: Mutex::default(),
            calls: AtomicUsize::new(0),
        };
        if broken.is_some_and(|broken| broken.is_procedure()) {
            deployment.store().fill(&deployment.pods());
        }
        for seat in &deployment.seats {
            seat.start();
        }
        let until = Instant::now() + Duration::from_secs(60);
        let is_there = || {
            // (who answers may be a stranger on our port)
            deployment.seats.iter().all(|seat| seat.is_alive() && seat.is_ready())
                && (deployment.seats[0].is_procedure() || deployment.knows_all_pods())
        };
        while !is_there() {
            if Instant::now() > until {
                return Err("the routers did not come up".into());
            }
            thread::sleep(Duration::from_millis(20));
        }
        if !deployment.seats[0].is_procedure() && !deployment.put_merchant() {
            return Err("no merchant".into());
        }
        Ok(deployment)
    }

    /// What an operator does at the start, and again when Redis has lost everything.
    fn put_merchant(&self) -> bool {
        let document = br#"{"pool": "acme"}"#;
        let path = "/api/v1/merchants/acme";
        let put = |seat: &Seat| http::ask(seat.address, "PUT", path, "application/json", document);
        let is_done = |seat: &Seat| put(seat).is_ok_and(|answer| answer.status == 200);
        let until = Instant::now() + Duration::from_secs(15);
        loop {
            if self.seats.iter().any(is_done) {
                return true;
            }
            if Instant::now() > until {
                return false;
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn knows_all_pods(&self) -> bool {
        let Ok(answer) = http::get(self.seats[0].address, "/api/v1/status") else { return false };
        let status: Value = serde_json::from_str(&answer.body).unwrap_or_default();
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

    /// The name of a pod that never was.
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

    /// The pods that somebody wanted to be drained.
    pub(crate) fn drained(&self) -> BTreeSet<String> {
        let drained = |event: Event| match event.what {
            What::Drain { pod, .. } => Some(pod),
            _ => None,
        };
        self.history.events().into_iter().filter_map(drained).collect()
    }

    /// Who leads, by the lease.
    pub(crate) fn leader(&self) -> Option<usize> {
        let (holder, _) = self.kube.holder()?;
        (0..ROUTERS).find(|number| holder.starts_with(&format!("router-{number}_")))
    }

    pub(crate) fn remove_pod(&self, pod: &str) {
        self.pods.lock().unwrap().retain(|other| other != pod);
        *self.generations.lock().unwrap().entry(pod.into()).or_default() += 1;
        self.history.note(self.history.now(), What::PodGone { pod: pod.into() });
        self.kube.delete(pod);
    }

    pub(crate) fn add_pod(&self, pod: &str) {
        self.history.note(self.history.now(), What::PodCame { pod: pod.into() });
        add_pod(&self.kube, pod);
        self.pods.lock().unwrap().push(pod.into());
    }

    /// Tells a pod from others of its name.
    pub(crate) fn generation(&self, pod: &str) -> usize {
        self.generations.lock().unwrap().get(pod).copied().unwrap_or(0)
    }

    /// A pod goes, and the cluster says nothing of it before the next of its name comes.
    pub(crate) fn remove_pod_quietly(&self, pod: &str) {
        self.pods.lock().unwrap().retain(|other| other != pod);
        *self.generations.lock().unwrap().entry(pod.into()).or_default() += 1;
        self.history.note(self.history.now(), What::PodGone { pod: pod.into() });
    }

    /// Whether Redis takes longer to answer than anybody who hangs up waits.
    pub(crate) fn is_slow(&self) -> bool {
        self.seats.iter().all(|seat| seat.to_redis.is_slow())
    }

    pub(crate) fn set_ready(&self, pod: &str, is_ready: bool) {
        let status = if is_ready { "True" } else { "False" };
        self.kube.update(pod, |object| {
            object["status"]["conditions"] = json!([{"type": "Ready", "status": status}]);
        });
    }

    /// A router is about to die; the answer is for [`Self::is_back`].
    pub(crate) fn dies(&self, router: usize) -> usize {
        let mut deaths = self.deaths.lock().unwrap();
        deaths.push((router, self.history.now(), Duration::MAX));
        deaths.len() - 1
    }

    pub(crate) fn is_back(&self, death: usize) {
        self.deaths.lock().unwrap()[death].2 = self.history.now();
    }

    /// A router sleeps, or wakes up. Nobody sends it anything meanwhile.
    pub(crate) fn pause(&self, router: usize, is_asleep: bool) {
        let now = self.history.now();
        let mut pauses = self.pauses.lock().unwrap();
        if is_asleep {
            pauses.push((router, now, Duration::MAX));
            self.seats[router].signal("STOP");
        } else {
            self.seats[router].signal("CONT");
            pauses.last_mut().unwrap().2 = now + Duration::from_millis(100);
        }
    }

    pub(crate) fn is_asleep(&self, router: usize) -> bool {
        self.pauses
            .lock()
            .unwrap()
            .iter()
            .any(|(other, _, to)| *other == router && *to == Duration::MAX)
    }

    /// Ends all faults of lines, and starts what is dead.
    pub(crate) fn heal(&self) {
        for seat in &self.seats {
            seat.to_redis.heal();
            seat.to_kube.heal();
            if !seat.is_alive() {
                seat.start();
            }
        }
        self.history.fault("all is well again");
        if !self.seats[0].is_procedure() {
            self.put_merchant();
        }
    }
}

fn add_pod(kube: &Kube, pod: &str) {
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

impl Seat {
    fn new(
        number: usize,
        cell: &'static str,
        broken: Option<Broken>,
        store: &Backend,
        kube: &Kube,
        settings: &BTreeMap<&'static str, String>,
    ) -> Self {
        let (to_redis, to_kube) = (Proxy::to(store.port()), Proxy::to(kube.port));
        let config = scratch().join("kubeconfig");
        let text = std::fs::read_to_string(&kube.config).unwrap();
        let text = text.replace(&format!(":{}", kube.port), &format!(":{}", to_kube.port()));
        std::fs::write(&config, text).unwrap();
        let port = free_port();
        let mut all: Vec<(String, String)> =
            settings.iter().map(|(name, value)| (name.to_string(), value.clone())).collect();
        let url = store.url(to_redis.port(), broken);
        for (name, value) in [
            ("HTTP_PORT", port.to_string()),
            ("METRICS_PORT", port.to_string()),
            ("POD_NAME", format!("router-{number}")),
            ("KUBECONFIG", config.to_str().unwrap().to_owned()),
            ("REDIS_URL", url),
        ] {
            all.push((name.into(), value));
        }
        Self {
            address: SocketAddr::from(([127, 0, 0, 1], port)),
            to_redis,
            to_kube,
            child: Arc::default(),
            settings: all,
            broken: broken.map(|broken| (cell, broken)),
        }
    }

    fn is_procedure(&self) -> bool {
        self.broken.is_some_and(|(_, broken)| broken.is_procedure())
    }

    pub(crate) fn start(&self) {
        self.start_with(&[]);
    }

    /// Starts the process with more in its surroundings.
    pub(crate) fn start_with(&self, more: &[(&str, String)]) {
        // One that was to be killed and was not would live on, and meddle with later runs.
        self.killer()();
        let mut command = match self.broken {
            Some((cell, broken)) if broken.is_another_program() => {
                let mut command = Command::new(std::env::current_exe().unwrap());
                command.args(["--as-broken-router", cell]);
                command
            }
            _ => Command::new(testkit::program_path()),
        };
        command.env_clear().envs(self.settings.iter().map(|(name, value)| (name, value)));
        command.envs(more.iter().map(|(name, value)| (*name, value)));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        if let Some(directory) = std::env::var_os("CHAOS_LOGS") {
            let path = PathBuf::from(directory).join(format!("router-{}.log", self.address.port()));
            let file = File::options().create(true).append(true).open(path);
            command.env("LOG_LEVEL", "info").stderr(file.expect("CHAOS_LOGS is a directory"));
        }
        *self.child.lock().unwrap() = Some(command.spawn().expect("a router starts"));
    }

    pub(crate) fn is_ready(&self) -> bool {
        let path = if self.is_procedure() { "/api/v1/tiers" } else { "/ready" };
        http::get(self.address, path).is_ok_and(|answer| answer.status == 200)
    }

    pub(crate) fn is_alive(&self) -> bool {
        let mut child = self.child.lock().unwrap();
        child.as_mut().is_some_and(|child| child.try_wait().is_ok_and(|status| status.is_none()))
    }

    pub(crate) fn signal(&self, name: &str) {
        if let Some(child) = self.child.lock().unwrap().as_ref() {
            signal(child, name);
        }
    }

    /// What kills this router, from anywhere.
    pub(crate) fn killer(&self) -> impl Fn() + Send + Sync + 'static {
        let child = self.child.clone();
        move || {
            if let Some(child) = child.lock().unwrap().as_mut() {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

pub(crate) fn signal(child: &Child, name: &str) {
    let _ = Command::new("kill").arg(format!("-{name}")).arg(child.id().to_string()).status();
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.killer()();
        self.to_redis.heal();
        self.to_redis.reset();
        self.to_kube.reset();
    }
}
