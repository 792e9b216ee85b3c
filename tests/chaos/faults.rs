//! Fault injection: the steps of the faults that need several.

use std::{
    cell::RefCell,
    thread,
    time::{Duration, Instant},
};

use redis::Commands;

use super::{
    deployment::{Deployment, ROUTERS},
    history::Action,
    store::Backend,
};
use testkit::{clock::WallClock, dice::Dice, proxy::KillPoint};

/// The environment of a fault.
pub(crate) struct FaultContext<'a> {
    pub deployment: &'a Deployment,
    pub dice: RefCell<Dice>,
    pub is_broken: bool,
    /// No other fault is injected at the same time.
    pub is_only_fault: bool,
}

impl FaultContext<'_> {
    pub(crate) fn roll(&self, sides: usize) -> usize {
        self.dice.borrow_mut().roll(sides)
    }

    pub(crate) fn pause(&self, min: u64, max: u64) {
        thread::sleep(Duration::from_millis(min + self.roll((max - min + 1) as usize) as u64));
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

impl FaultContext<'_> {
    /// Fails the run if its only fault did not take effect: such a run proves nothing.
    pub(crate) fn expect(&self, happened: bool, what: &str) {
        assert!(happened || !self.is_only_fault, "the fault did not take effect: {what}");
    }
}

/// Whether a server has a role: `master` or `slave`.
fn has_role(context: &FaultContext, server: usize, role: &str) -> bool {
    let connection = context.deployment.store().servers[server].client().get_connection();
    let Ok(mut redis) = connection else { return false };
    let found: Vec<redis::Value> = redis::cmd("ROLE").query(&mut redis).unwrap_or_default();
    found
        .into_iter()
        .next()
        .is_some_and(|name| redis::from_redis_value::<String>(name).is_ok_and(|name| name == role))
}

/// Separates the primary from its replicas. Redis acknowledges before it replicates, so writes
/// that the primary acknowledges before it detects the loss may be lost; callers treat their
/// replies as lost.
pub(crate) fn lose_primary(
    context: &FaultContext,
    what: &'static str,
    how: impl FnOnce(&mut Backend),
) {
    let deployment = context.deployment;
    let mut unreplicated_until = deployment.unreplicated_until.write().unwrap();
    thread::sleep(Duration::from_millis(50));
    deployment.history.fault(what);
    how(&mut deployment.store());
    let has_no_replicas = || {
        let redis = deployment.store().servers[0].client();
        let timeout = Duration::from_millis(100);
        let replication = redis.get_connection_with_timeout(timeout).and_then(|mut redis| {
            redis.set_read_timeout(Some(timeout))?;
            redis::cmd("INFO").arg("replication").query::<String>(&mut redis)
        });
        replication.is_ok_and(|info| info.contains("connected_slaves:0"))
    };
    context.until(Duration::from_millis(500), has_no_replicas);
    // Replies may still be in flight.
    *unreplicated_until = deployment.history.now();
    drop(unreplicated_until);
}

/// Waits until another server is the primary.
pub(crate) fn wait_for_failover(context: &FaultContext) {
    let is_replaced = || has_role(context, 1, "master") || has_role(context, 2, "master");
    let has_happened = context.until(Duration::from_secs(60), is_replaced);
    context.expect(has_happened, "another server is the primary");
}

/// Waits until the old primary is a replica.
pub(crate) fn wait_for_rejoin(context: &FaultContext) {
    let has_followed = context.until(Duration::from_secs(60), || has_role(context, 0, "slave"));
    context.expect(has_followed, "the old primary follows the new one");
}

pub(crate) fn kill(context: &FaultContext, point: KillPoint) {
    for _ in 0..2 {
        context.pause(150, 300);
        let index = context.roll(ROUTERS);
        let router = &context.deployment.routers[index];
        context.deployment.history.fault(format!("a router is killed: {point:?}"));
        let crash = context.deployment.record_crash(index);
        router.redis_proxy.kill_on_allocate(point, router.killer());
        let is_dead = context.until(Duration::from_secs(3), || !router.is_alive());
        router.redis_proxy.cancel_kill();
        context.expect(is_dead, "a router is killed");
        context.pause(50, 150);
        router.start();
        context.until(Duration::from_secs(2), || router.is_ready());
        context.deployment.record_restart(crash);
    }
}

pub(crate) fn slow_network(context: &FaultContext) {
    context.pause(200, 400);
    context.deployment.history.fault("the network is slow");
    for (min, max) in [(50, 250), (100, 500), (50, 2_000)] {
        let limits = (Duration::from_millis(min), Duration::from_millis(max));
        for router in &context.deployment.routers {
            router.redis_proxy.set_faults(|faults| faults.latency = Some(limits));
        }
        context.pause(600, 800);
    }
}

pub(crate) fn drop_replies(context: &FaultContext) {
    let set_dropped = |is_dropped| {
        for router in &context.deployment.routers {
            router.redis_proxy.set_faults(|faults| faults.drop_replies = is_dropped);
        }
    };
    for _ in 0..2 {
        context.pause(200, 400);
        context.deployment.history.fault("replies are lost");
        set_dropped(true);
        context.pause(900, 1_400);
        set_dropped(false);
    }
}

/// Steps Redis's clock back while an orphaned call exists.
pub(crate) fn step_redis_clock_back(context: &FaultContext, seconds: i64) {
    let index = context.roll(ROUTERS);
    let router = &context.deployment.routers[index];
    context
        .deployment
        .history
        .fault(format!("a router is killed and Redis's clock set back by {seconds} s"));
    let crash = context.deployment.record_crash(index);
    router.redis_proxy.kill_on_allocate(KillPoint::AfterReply, router.killer());
    let is_dead = context.until(Duration::from_secs(3), || !router.is_alive());
    context
        .deployment
        .store()
        .clock
        .as_ref()
        .expect("Redis has an adjustable clock")
        .set_ahead(-seconds);
    router.redis_proxy.cancel_kill();
    context.expect(is_dead, "a router is killed");
    router.start();
    context.until(Duration::from_secs(2), || router.is_ready());
    context.deployment.record_restart(crash);
    context.pause(500, 1_000);
}

pub(crate) fn shift_clock(context: &FaultContext, seconds: i64) {
    let index = context.roll(ROUTERS);
    let router = &context.deployment.routers[index];
    context.deployment.history.fault(format!("a router starts again, {seconds} s off"));
    let crash = context.deployment.record_crash(index);
    router.killer()();
    router.start_with(&WallClock::ahead(seconds).settings());
    context.until(Duration::from_secs(2), || router.is_ready());
    context.deployment.record_restart(crash);
    context.pause(1_500, 2_000);
}

pub(crate) fn random_pod(context: &FaultContext, tier: &str) -> String {
    let pods: Vec<String> =
        context.deployment.pods().into_iter().filter(|pod| pod.starts_with(tier)).collect();
    pods[context.roll(pods.len())].clone()
}

/// Removes some pods and adds others.
pub(crate) fn replace_pods(context: &FaultContext, is_quick: bool) {
    for _ in 0..2 {
        let pod = random_pod(context, "gold");
        context.deployment.remove_pod(&pod);
        context.deployment.add_pod(&context.deployment.new_pod("gold"));
        if !is_quick {
            context.pause(100, 200);
        }
    }
}

pub(crate) fn pause_leader(context: &FaultContext) {
    let deployment = context.deployment;
    if !context.until(Duration::from_secs(3), || deployment.leader().is_some()) {
        return;
    }
    let old = deployment.leader().unwrap();
    let router = &deployment.routers[old];
    // The leader is paused while its write of a new pod is in flight.
    router.redis_proxy.stall_all();
    let stale_pod = deployment.new_pod("gold");
    deployment.add_pod(&stale_pod);
    context.until(Duration::from_secs(2), || router.redis_proxy.has_stalled(&stale_pod));
    deployment.pause(old, true);
    deployment.remove_pod(&stale_pod);
    context
        .until(Duration::from_secs(4), || deployment.leader().is_some_and(|leader| leader != old));
    replace_pods(context, true);
    context.pause(300, 500);
    router.redis_proxy.heal();
    context.pause(20, 60);
    deployment.pause(old, false);
    context.pause(300, 500);
}

/// The leader is killed, and pods terminate before another router leads.
pub(crate) fn kill_leader(context: &FaultContext) {
    let deployment = context.deployment;
    if !context.until(Duration::from_secs(5), || deployment.leader().is_some()) {
        return;
    }
    let leader = deployment.leader().unwrap();
    let others = || deployment.routers.iter().enumerate().filter(|(at, _)| *at != leader);
    deployment.history.fault("the leader is killed");
    let crash = deployment.record_crash(leader);
    deployment.routers[leader].killer()();
    if context.is_broken {
        others().for_each(|(_, router)| router.kube_proxy.stall_all());
    }
    let mut pods = vec![random_pod(context, "gold"), random_pod(context, "gold")];
    pods.dedup();
    pods.iter().for_each(|pod| deployment.kube.terminate(pod));
    let is_drained = || {
        let mut redis = deployment.store().connection()?;
        let keys = pods.iter().map(|pod| format!("voice:pod:draining:{pod}"));
        keys.map(|key| redis.exists(key).ok()).collect::<Option<Vec<bool>>>()
    };
    let is_drained = || is_drained().is_some_and(|all| all.into_iter().all(|it| it));
    let is_drained_by_others = context.until(Duration::from_secs(2), is_drained);
    context.expect(
        context.is_broken || is_drained_by_others,
        "the others drain the pods that terminate",
    );
    if is_drained_by_others || context.is_broken {
        let out_of_service = |pod: &String| Action::PodOutOfService { pod: pod.clone() };
        pods.iter().for_each(|pod| {
            deployment.history.record(deployment.history.now(), out_of_service(pod))
        });
    }
    context.pause(1_000, 1_500);
    for pod in &pods {
        deployment.remove_pod(pod);
        deployment.add_pod(&deployment.new_pod("gold"));
    }
    deployment.routers[leader].start();
    context.until(Duration::from_secs(2), || deployment.routers[leader].is_ready());
    deployment.record_restart(crash);
    context.pause(300, 500);
}

pub(crate) fn two_leaders(context: &FaultContext) {
    let deployment = context.deployment;
    let epoch = || -> u64 {
        let redis = deployment.store().connection();
        redis.and_then(|mut redis| redis.get("voice:leader:epoch").ok()).unwrap_or(0)
    };
    for _ in 0..2 {
        if !context.until(Duration::from_secs(3), || deployment.leader().is_some()) {
            return;
        }
        let (old, before) = (deployment.leader().unwrap(), epoch());
        let router = &deployment.routers[old];
        deployment.history.fault("two leaders");
        router.redis_proxy.stall_all();
        let stale_pod = deployment.new_pod("gold");
        deployment.add_pod(&stale_pod);
        // The old leader sees the new pod and no later event.
        context.until(Duration::from_secs(2), || router.redis_proxy.has_stalled(&stale_pod));
        router.kube_proxy.stall_all();
        deployment.remove_pod(&stale_pod);
        deployment.kube.delete_lease();
        context.until(Duration::from_secs(4), || epoch() > before);
        // The new leader reconciles first, so that a later stale write comes from the old one.
        context.pause(300, 400);
        router.redis_proxy.heal();
        // The old leader must not see the removal of the pod while it still leads.
        context.pause(1_100, 1_200);
        router.kube_proxy.heal();
        context.pause(300, 500);
    }
}

pub(crate) fn replay_events(context: &FaultContext) {
    for _ in 0..3 {
        context.pause(100, 300);
        let pod = random_pod(context, "gold");
        let outdated = context.deployment.kube.pod(&pod);
        context.deployment.remove_pod(&pod);
        // In the broken build, another UID makes the event look like a new pod.
        context.deployment.kube.replay_event(outdated, context.is_broken);
        context.deployment.add_pod(&context.deployment.new_pod("gold"));
    }
    context.pause(300, 500);
}

pub(crate) fn expire_watches(context: &FaultContext) {
    let kube = &context.deployment.kube;
    for _ in 0..3 {
        // The events are dropped, and watches from an older version get 410. The broken build
        // continues its watch without a 410.
        kube.faults(|faults| faults.drop_events = true);
        replace_pods(context, false);
        kube.faults(|faults| faults.drop_events = false);
        if !context.is_broken {
            kube.compact();
            kube.drop_watches();
        }
        context.pause(200, 300);
    }
    context.expect(context.is_broken || kube.expired_watches() > 0, "410");
}

pub(crate) fn overwrite_types(context: &FaultContext) {
    let keys = [
        "voice:pool:gold:available",
        "voice:pool:basic:available",
        "voice:pool:gold:assigned",
        "voice:pool:gold:out",
        "voice:merchant:acme:pods",
    ];
    for _ in 0..4 {
        context.pause(100, 300);
        let key = keys[context.roll(keys.len())];
        context.deployment.history.fault(format!("{key} is a string"));
        if let Some(mut redis) = context.deployment.store().connection() {
            let _: Result<(), _> =
                redis::pipe().atomic().del(key).set(key, "what").query(&mut redis);
        }
    }
}

pub(crate) fn fill_memory(context: &FaultContext) {
    let memory = |limit: u64| {
        let mut redis = context.deployment.store().connection().unwrap();
        let _: () =
            redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(limit).query(&mut redis).unwrap();
    };
    context.pause(500, 700);
    context.deployment.history.fault("Redis is full");
    memory(1);
    context.pause(2_500, 3_000);
    memory(0);
}

pub(crate) fn flush_functions(context: &FaultContext) {
    if context.is_broken {
        for router in &context.deployment.routers {
            router.redis_proxy.replace_in_requests(b"FUNCTION", b"FUNCTIOX");
        }
    }
    for _ in 0..5 {
        context.pause(100, 300);
        context.deployment.history.fault("the function library is flushed");
        let mut redis = context.deployment.store().connection().unwrap();
        let _: () = redis::cmd("FUNCTION").arg("FLUSH").query(&mut redis).unwrap();
    }
}
