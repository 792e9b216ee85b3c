//! Faults of the cells with streams.

use std::{
    cell::RefCell,
    sync::{Arc, atomic::Ordering},
    thread,
    time::Duration,
};

use tokio::{runtime::Runtime, task::JoinHandle};

use super::{GATEWAYS, World, agents::AgentPod, callers::Caller, record::Disturbance, wait_for};
use testkit::dice::Dice;

/// Interval of heartbeats: a third of the lease of a gateway, at most 5 s.
const HEARTBEATS_PER_LEASE: u32 = 3;
/// Time until a sweep has ended the calls of a gateway whose lease has ended.
const SWEEP_TIME: Duration = Duration::from_millis(1_200);
/// Time for a router to reconnect to Redis, and for a stream to move.
const MAX_RESOLUTION_TIME: Duration = Duration::from_secs(2);

/// The environment of a fault.
pub(crate) struct StreamFault<'a> {
    pub world: &'a Arc<World>,
    pub runtime: &'a Runtime,
    pub dice: RefCell<Dice>,
    /// Calls that the fault began.
    pub calls: RefCell<Vec<JoinHandle<()>>>,
}

impl StreamFault<'_> {
    pub(crate) fn pause(&self, min: u64, max: u64) {
        let pause = self.dice.borrow_mut().between(min, max);
        thread::sleep(Duration::from_millis(pause));
    }

    fn fault(&self, what: impl Into<String>) {
        self.world.recorder.history.fault(what);
    }

    /// Removes all faults, and restarts gateways that were killed.
    pub(crate) fn heal(&self) {
        for gateway in &self.world.gateways {
            gateway.redis_proxy.heal();
            if !gateway.process.is_alive() {
                gateway.process.start();
            }
        }
        for gateway in &self.world.gateways {
            wait_for(Duration::from_secs(20), || gateway.process.is_ready());
            gateway.is_usable.store(true, Ordering::Relaxed);
        }
        self.fault("all faults are removed");
    }

    /// Begins calls, each by a caller of its own.
    fn begin_calls(&self, count: usize, call_ms: (u64, u64)) {
        for _ in 0..count {
            let dice = Dice(self.dice.borrow_mut().roll(usize::MAX >> 1) as u64);
            let mut caller = Caller { world: self.world.clone(), dice, call_ms: Some(call_ms) };
            let call = self.runtime.spawn(async move { caller.call_once().await });
            self.calls.borrow_mut().push(call);
        }
    }

    fn is_busy(&self, pod: &AgentPod) -> bool {
        let streams = self.world.recorder.agent_streams();
        streams.iter().any(|it| it.pod == pod.name && it.to.is_none())
    }

    /// Takes the gateway with most streams; callers do not use it any more.
    fn take_gateway(&self) -> usize {
        let number = (0..GATEWAYS).max_by_key(|it| self.world.open_streams(*it)).unwrap_or(0);
        self.world.gateways[number].is_usable.store(false, Ordering::Relaxed);
        number
    }
}

/// Kills pods with streams, and starts them again.
pub(crate) fn kill_pods(fault: &StreamFault) {
    for _ in 0..8 {
        fault.pause(300, 700);
        let busy: Vec<&Arc<AgentPod>> =
            fault.world.agents.iter().filter(|pod| fault.is_busy(pod)).collect();
        let chosen = fault.dice.borrow_mut().roll(busy.len().max(1));
        let Some(pod) = busy.get(chosen) else { continue };
        fault.world.recorder.mark_faulty(&pod.name);
        fault.fault(format!("{} is killed", pod.name));
        pod.kill();
        fault.pause(100, 500);
        fault.runtime.block_on(pod.restart());
    }
    fault.pause(800, 1_200);
}

/// Makes some pods slow to answer handshakes, and lets others stall in mid-stream.
pub(crate) fn slow_pods(fault: &StreamFault) {
    let agents = &fault.world.agents;
    for pod in &agents[..2] {
        fault.world.recorder.mark_faulty(&pod.name);
        pod.behaviour.is_slow.store(true, Ordering::Relaxed);
    }
    for _ in 0..4 {
        fault.pause(1_000, 1_500);
        let pod = &agents[2 + fault.dice.borrow_mut().roll(agents.len() - 2)];
        let time = Duration::from_millis(fault.dice.borrow_mut().between(500, 3_000));
        fault.fault(format!("{} stalls for {time:?}", pod.name));
        let until = fault.world.recorder.now() + time;
        pod.behaviour.stalls_until.store(until.as_millis() as u64, Ordering::Relaxed);
    }
    fault.pause(1_500, 2_000);
    for pod in &agents[..2] {
        pod.behaviour.is_slow.store(false, Ordering::Relaxed);
    }
}

/// Kills a gateway with its streams. It stays down until its lease has ended.
pub(crate) fn kill_gateway(fault: &StreamFault, lease: Duration) {
    fault.pause(2_000, 3_000);
    let number = fault.take_gateway();
    let from = fault.world.recorder.now();
    fault.fault(format!("gateway {number} is killed"));
    fault.world.gateways[number].process.killer()();
    fault.world.recorder.disturb(Disturbance {
        gateway: Some(number),
        from: from - Duration::from_millis(300),
        to: Duration::MAX,
        refuses: true,
        cuts: true,
        overlaps: false,
    });
    thread::sleep(lease + Duration::from_secs(1));
}

/// Cuts a gateway off from Redis for a time. Longer than its lease, its pods go to other calls.
pub(crate) fn cut_off_gateway(fault: &StreamFault, lease: Duration, time: Duration) {
    fault.pause(2_000, 3_000);
    let number = fault.take_gateway();
    let gateway = &fault.world.gateways[number];
    let from = fault.world.recorder.now();
    fault.fault(format!("gateway {number} is cut off from Redis for {time:?}"));
    gateway.redis_proxy.refuse_connections(true);
    if let Some(left) = time.checked_sub(lease + SWEEP_TIME) {
        thread::sleep(time - left);
        // The store counts the pods of the gateway as free.
        fault.begin_calls(4, (6_000, 7_000));
        thread::sleep(left);
    } else {
        thread::sleep(time);
    }
    gateway.redis_proxy.heal();
    fault.fault(format!("gateway {number} reaches Redis again"));
    let to = fault.world.recorder.now() + lease / HEARTBEATS_PER_LEASE + MAX_RESOLUTION_TIME;
    fault.world.recorder.disturb(Disturbance {
        gateway: Some(number),
        from: from - Duration::from_millis(300),
        to,
        refuses: true,
        cuts: false,
        overlaps: time > lease,
    });
    thread::sleep(to - fault.world.recorder.now());
    gateway.is_usable.store(true, Ordering::Relaxed);
    fault.pause(1_000, 1_500);
}

/// Stops Redis for a time.
pub(crate) fn stop_redis(fault: &StreamFault, time: Duration) {
    fault.pause(1_500, 2_000);
    let from = fault.world.recorder.now();
    fault.fault(format!("Redis stops for {time:?}"));
    fault.world.store.servers[0].signal("STOP");
    thread::sleep(time);
    fault.world.store.servers[0].signal("CONT");
    fault.fault("Redis goes on");
    fault.world.recorder.disturb(Disturbance {
        gateway: None,
        // A stream may be opened, and its pod tried, over the whole time.
        from: from - Duration::from_secs(1),
        to: fault.world.recorder.now() + MAX_RESOLUTION_TIME,
        refuses: true,
        cuts: false,
        overlaps: false,
    });
    // Calls of this time are checked as calls during the fault, those after it as undisturbed ones.
    thread::sleep(MAX_RESOLUTION_TIME);
    fault.pause(1_000, 1_500);
}

/// Wipes Redis with streams attached.
pub(crate) fn wipe_store(fault: &StreamFault, lease: Duration) {
    fault.pause(2_000, 2_500);
    let from = fault.world.recorder.now();
    fault.fault("Redis is wiped");
    let mut redis = fault.world.store.servers[0].connection();
    let () = redis::cmd("FLUSHALL").query(&mut redis).expect("Redis answers");
    let to = fault.world.recorder.now() + lease / HEARTBEATS_PER_LEASE + MAX_RESOLUTION_TIME;
    fault.world.recorder.disturb(Disturbance {
        gateway: None,
        from: from - Duration::from_secs(1),
        to,
        refuses: true,
        cuts: false,
        overlaps: true,
    });
    thread::sleep(to - fault.world.recorder.now());
    fault.pause(2_000, 3_000);
}
