//! What goes wrong, step by step.

use std::{
    cell::RefCell,
    thread,
    time::{Duration, Instant},
};

use redis::Commands;

use super::{
    deployment::{Deployment, ROUTERS},
    history::What,
    store::Backend,
};
use testkit::{clock::WallClock, dice::Dice, proxy::Moment};

/// Where a fault happens.
pub(crate) struct Scene<'a> {
    pub deployment: &'a Deployment,
    pub dice: RefCell<Dice>,
    pub is_broken: bool,
    /// Nothing else goes wrong meanwhile.
    pub is_alone: bool,
}

impl Scene<'_> {
    pub(crate) fn roll(&self, sides: usize) -> usize {
        self.dice.borrow_mut().roll(sides)
    }

    pub(crate) fn pause(&self, least: u64, most: u64) {
        thread::sleep(Duration::from_millis(least + self.roll((most - least + 1) as usize) as u64));
    }

    fn until(&self, within: Duration, holds: impl Fn() -> bool) -> bool {
        let until = Instant::now() + within;
        while !holds() {
            if Instant::now() > until {
                return false;
            }
            thread::sleep(Duration::from_millis(5));
        }
        true
    }
}

impl Scene<'_> {
    /// A run whose fault did not happen shows nothing.
    pub(crate) fn expect(&self, happened: bool, what: &str) {
        assert!(happened || !self.is_alone, "the fault did not happen: {what}");
    }
}

/// Whether a server of several has a role: `master`, `slave`.
fn has_role(scene: &Scene, server: usize, role: &str) -> bool {
    let connection = scene.deployment.store().servers[server].client().get_connection();
    let Ok(mut redis) = connection else { return false };
    let found: Vec<redis::Value> = redis::cmd("ROLE").query(&mut redis).unwrap_or_default();
    found
        .into_iter()
        .next()
        .is_some_and(|name| redis::from_redis_value::<String>(name).is_ok_and(|name| name == role))
}

/// Takes the primary from its replicas. Redis answers before it replicates: what it
/// acknowledges in the moments before it knows is not promised to last, so nobody hears it.
pub(crate) fn lose_primary(scene: &Scene, what: &'static str, how: impl FnOnce(&mut Backend)) {
    let deployment = scene.deployment;
    let mut doubt = deployment.doubt.write().unwrap();
    thread::sleep(Duration::from_millis(50));
    deployment.history.fault(what);
    how(&mut deployment.store());
    let is_alone = || {
        let redis = deployment.store().servers[0].client();
        let timeout = Duration::from_millis(100);
        let asked = redis.get_connection_with_timeout(timeout).and_then(|mut redis| {
            redis.set_read_timeout(Some(timeout))?;
            redis::cmd("INFO").arg("replication").query::<String>(&mut redis)
        });
        asked.is_ok_and(|told| told.contains("connected_slaves:0"))
    };
    scene.until(Duration::from_millis(500), is_alone);
    // Answers may still be on their way.
    *doubt = deployment.history.now();
    drop(doubt);
}

/// Waits until another server is the primary.
pub(crate) fn is_replaced(scene: &Scene) {
    let is_replaced = || has_role(scene, 1, "master") || has_role(scene, 2, "master");
    let has_happened = scene.until(Duration::from_secs(60), is_replaced);
    scene.expect(has_happened, "another server is the primary");
}

/// Waits until what was the primary follows another.
pub(crate) fn follows(scene: &Scene) {
    let has_followed = scene.until(Duration::from_secs(60), || has_role(scene, 0, "slave"));
    scene.expect(has_followed, "the old primary follows the new one");
}

pub(crate) fn kill(scene: &Scene, moment: Moment) {
    for _ in 0..2 {
        scene.pause(150, 300);
        let router = scene.roll(ROUTERS);
        let seat = &scene.deployment.seats[router];
        scene.deployment.history.fault(format!("a router is killed: {moment:?}"));
        let death = scene.deployment.dies(router);
        seat.to_redis.trap(moment, seat.killer());
        let is_dead = scene.until(Duration::from_secs(3), || !seat.is_alive());
        seat.to_redis.disarm();
        scene.expect(is_dead, "a router is killed");
        scene.pause(50, 150);
        seat.start();
        scene.until(Duration::from_secs(2), || seat.is_ready());
        scene.deployment.is_back(death);
    }
}

/// Sets Redis's clock back while a call is left that no caller knows of.
pub(crate) fn set_back_redis(scene: &Scene, seconds: i64) {
    let router = scene.roll(ROUTERS);
    let seat = &scene.deployment.seats[router];
    scene
        .deployment
        .history
        .fault(format!("a router is killed and Redis's clock set back by {seconds} s"));
    let death = scene.deployment.dies(router);
    seat.to_redis.trap(Moment::AfterReply, seat.killer());
    let is_dead = scene.until(Duration::from_secs(3), || !seat.is_alive());
    scene
        .deployment
        .store()
        .clock
        .as_ref()
        .expect("Redis has a clock of its own")
        .set_ahead(-seconds);
    seat.to_redis.disarm();
    scene.expect(is_dead, "a router is killed");
    seat.start();
    scene.until(Duration::from_secs(2), || seat.is_ready());
    scene.deployment.is_back(death);
    scene.pause(500, 1_000);
}

pub(crate) fn shift_clock(scene: &Scene, seconds: i64) {
    let router = scene.roll(ROUTERS);
    let seat = &scene.deployment.seats[router];
    scene.deployment.history.fault(format!("a router starts again, {seconds} s off"));
    let death = scene.deployment.dies(router);
    seat.killer()();
    seat.start_with(&WallClock::ahead(seconds).settings());
    scene.until(Duration::from_secs(2), || seat.is_ready());
    scene.deployment.is_back(death);
    scene.pause(1_500, 2_000);
}

pub(crate) fn some_pod(scene: &Scene, tier: &str) -> String {
    let pods: Vec<String> =
        scene.deployment.pods().into_iter().filter(|pod| pod.starts_with(tier)).collect();
    pods[scene.roll(pods.len())].clone()
}

/// Takes some pods away and brings others.
pub(crate) fn replace_pods(scene: &Scene, quick: bool) {
    for _ in 0..2 {
        let pod = some_pod(scene, "gold");
        scene.deployment.remove_pod(&pod);
        scene.deployment.add_pod(&scene.deployment.new_pod("gold"));
        if !quick {
            scene.pause(100, 200);
        }
    }
}

pub(crate) fn pause_leader(scene: &Scene) {
    let deployment = scene.deployment;
    if !scene.until(Duration::from_secs(3), || deployment.leader().is_some()) {
        return;
    }
    let old = deployment.leader().unwrap();
    let seat = &deployment.seats[old];
    // It falls asleep with a pod on its mind: what it says of it is on its way.
    seat.to_redis.stall();
    let ghost = deployment.new_pod("gold");
    deployment.add_pod(&ghost);
    scene.until(Duration::from_secs(2), || seat.to_redis.holds(&ghost));
    deployment.pause(old, true);
    deployment.remove_pod(&ghost);
    scene.until(Duration::from_secs(4), || deployment.leader().is_some_and(|leader| leader != old));
    replace_pods(scene, true);
    scene.pause(300, 500);
    seat.to_redis.heal();
    scene.pause(20, 60);
    deployment.pause(old, false);
    scene.pause(300, 500);
}

/// The leader is killed, and pods terminate before another router leads.
pub(crate) fn kill_leader(scene: &Scene) {
    let deployment = scene.deployment;
    if !scene.until(Duration::from_secs(5), || deployment.leader().is_some()) {
        return;
    }
    let leader = deployment.leader().unwrap();
    let others = || deployment.seats.iter().enumerate().filter(|(at, _)| *at != leader);
    deployment.history.fault("the leader is killed");
    let death = deployment.dies(leader);
    deployment.seats[leader].killer()();
    if scene.is_broken {
        others().for_each(|(_, seat)| seat.to_kube.stall());
    }
    let mut pods = vec![some_pod(scene, "gold"), some_pod(scene, "gold")];
    pods.dedup();
    pods.iter().for_each(|pod| deployment.kube.terminate(pod));
    let is_drained = || {
        let mut redis = deployment.store().connection()?;
        let keys = pods.iter().map(|pod| format!("voice:pod:draining:{pod}"));
        keys.map(|key| redis.exists(key).ok()).collect::<Option<Vec<bool>>>()
    };
    let is_drained = || is_drained().is_some_and(|all| all.into_iter().all(|it| it));
    let is_seen = scene.until(Duration::from_secs(2), is_drained);
    scene.expect(scene.is_broken || is_seen, "the others drain the pods that terminate");
    if is_seen || scene.is_broken {
        let rests = |pod: &String| What::PodRests { pod: pod.clone() };
        pods.iter().for_each(|pod| deployment.history.note(deployment.history.now(), rests(pod)));
    }
    scene.pause(1_000, 1_500);
    for pod in &pods {
        deployment.remove_pod(pod);
        deployment.add_pod(&deployment.new_pod("gold"));
    }
    deployment.seats[leader].start();
    scene.until(Duration::from_secs(2), || deployment.seats[leader].is_ready());
    deployment.is_back(death);
    scene.pause(300, 500);
}

pub(crate) fn two_leaders(scene: &Scene) {
    let deployment = scene.deployment;
    let epoch = || -> u64 {
        let redis = deployment.store().connection();
        redis.and_then(|mut redis| redis.get("voice:leader:epoch").ok()).unwrap_or(0)
    };
    for _ in 0..2 {
        if !scene.until(Duration::from_secs(3), || deployment.leader().is_some()) {
            return;
        }
        let (old, before) = (deployment.leader().unwrap(), epoch());
        let seat = &deployment.seats[old];
        deployment.history.fault("two leaders");
        seat.to_redis.stall();
        let ghost = deployment.new_pod("gold");
        deployment.add_pod(&ghost);
        // It hears of the pod, and of nothing after it.
        scene.until(Duration::from_secs(2), || seat.to_redis.holds(&ghost));
        seat.to_kube.stall();
        deployment.remove_pod(&ghost);
        deployment.kube.delete_lease();
        scene.until(Duration::from_secs(4), || epoch() > before);
        // (the new one compares first: what comes after that is the old one's alone)
        scene.pause(300, 400);
        seat.to_redis.heal();
        // (it must not hear of the pod's end while it still leads)
        scene.pause(1_100, 1_200);
        seat.to_kube.heal();
        scene.pause(300, 500);
    }
}

pub(crate) fn expire_watches(scene: &Scene) {
    let kube = &scene.deployment.kube;
    for _ in 0..3 {
        // Nobody hears of these, and who asks for what came since is told 410. A router
        // that does not hear that goes on from where things are.
        kube.faults(|faults| faults.lose = true);
        replace_pods(scene, false);
        kube.faults(|faults| faults.lose = false);
        if !scene.is_broken {
            kube.compact();
            kube.drop_watches();
        }
        scene.pause(200, 300);
    }
    scene.expect(scene.is_broken || kube.expired() > 0, "410");
}

pub(crate) fn mistake_types(scene: &Scene) {
    let keys = [
        "voice:pool:gold:available",
        "voice:pool:basic:available",
        "voice:pool:gold:assigned",
        "voice:pool:gold:out",
        "voice:merchant:acme:pods",
    ];
    for _ in 0..4 {
        scene.pause(100, 300);
        let key = keys[scene.roll(keys.len())];
        scene.deployment.history.fault(format!("{key} is a string"));
        if let Some(mut redis) = scene.deployment.store().connection() {
            let _: Result<(), _> =
                redis::pipe().atomic().del(key).set(key, "what").query(&mut redis);
        }
    }
}

pub(crate) fn fill_memory(scene: &Scene) {
    let memory = |limit: u64| {
        let mut redis = scene.deployment.store().connection().unwrap();
        let _: () =
            redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(limit).query(&mut redis).unwrap();
    };
    scene.pause(500, 700);
    scene.deployment.history.fault("Redis is full");
    memory(1);
    scene.pause(2_500, 3_000);
    memory(0);
}

pub(crate) fn forget_functions(scene: &Scene) {
    if scene.is_broken {
        for seat in &scene.deployment.seats {
            seat.to_redis.replace(b"FUNCTION", b"FUNCTIOX");
        }
    }
    for _ in 0..5 {
        scene.pause(100, 300);
        scene.deployment.history.fault("functions are gone");
        let mut redis = scene.deployment.store().connection().unwrap();
        let _: () = redis::cmd("FUNCTION").arg("FLUSH").query(&mut redis).unwrap();
    }
}
