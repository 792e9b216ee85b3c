//! Scale-down: single plans, and a workload that follows the published numbers with delays.

use proptest::prelude::*;

use crate::{
    Millis,
    capacity::{
        PodStage::{self, InService, OutOfService, Starting, Surplus, Terminating},
        ScaleMemory, ScalePlan, ScaledPod, ScaledPool, plan,
    },
    names::PodName,
    testing::dice::Dice,
    workload::WorkloadKind::{self, Deployment, StatefulSet},
};

const SETTLE: Millis = 10_000;

fn pod(ordinal: u32, stage: PodStage, calls: usize) -> ScaledPod {
    ScaledPod {
        name: format!("agent-{ordinal}").parse().unwrap(),
        stage,
        is_ready: stage != Starting,
        calls,
        ordinal: Some(ordinal),
        created_at: Millis::from(ordinal),
        is_marked: false,
    }
}

fn pods(stages: &[(PodStage, usize)]) -> Vec<ScaledPod> {
    (0..).zip(stages).map(|(number, (stage, calls))| pod(number, *stage, *calls)).collect()
}

fn settled() -> ScaleMemory {
    let mut memory = ScaleMemory::new(0, 0);
    memory.published(0, 0, 0, 0);
    memory
}

fn plan_for(kind: WorkloadKind, desired: u64, pods: &[ScaledPod]) -> ScalePlan {
    let pool = ScaledPool {
        kind,
        desired,
        replicas: None,
        published: pods.len() as u64,
        pods,
        is_rolling_out: false,
    };
    plan(&pool, &mut settled(), 1, SETTLE)
}

fn texts(names: &[PodName]) -> Vec<&str> {
    names.iter().map(PodName::as_str).collect()
}

#[test]
fn a_deployment_retires_idle_pods_and_marks_them_before_the_number_falls() {
    let mut pods = pods(&[(InService, 1), (InService, 0), (InService, 1), (InService, 0)]);
    let first = plan_for(Deployment, 2, &pods);
    assert_eq!((texts(&first.retire), first.number), (vec!["agent-3", "agent-1"], 4));
    for index in [1, 3] {
        pods[index].stage = Surplus;
    }
    let second = plan_for(Deployment, 2, &pods);
    assert_eq!((second.mark.len(), second.number), (2, 4), "unmarked pods could stay");
    pods[1].is_marked = true;
    assert_eq!(plan_for(Deployment, 2, &pods).number, 3);
    pods[3].is_marked = true;
    assert_eq!(plan_for(Deployment, 2, &pods).number, 2);
}

#[test]
fn a_number_never_falls_for_a_surplus_pod_with_calls() {
    let mut pods = pods(&[(InService, 1), (Surplus, 2)]);
    pods[1].is_marked = true;
    let first = plan_for(Deployment, 1, &pods);
    assert_eq!((first.number, texts(&first.unmark)), (2, vec!["agent-1"]));
    assert_eq!(plan_for(StatefulSet, 1, &pods).number, 2);
}

#[test]
fn a_deployment_with_starting_pods_keeps_its_number() {
    let mut pods = pods(&[(InService, 1), (Surplus, 0), (Starting, 0)]);
    pods[1].is_marked = true;
    let kept = plan_for(Deployment, 2, &pods);
    assert_eq!((kept.number, kept.retire.len(), kept.mark.len()), (3, 0, 0));
    let surplus = plan_for(Deployment, 1, &pods);
    assert_eq!(texts(&surplus.retire), ["agent-2"], "no starting pod is needed");
    // A Deployment removes a pod that is not ready before any other.
    (pods[0].is_ready, pods[2].stage) = (false, Surplus);
    assert_eq!(plan_for(Deployment, 1, &pods).number, 3, "a pod with a call is not ready");
    pods[0].is_ready = true;
    assert_eq!(plan_for(Deployment, 1, &pods).number, 2);
}

#[test]
fn a_rollout_neither_lowers_nor_raises_the_number() {
    let mut pods = pods(&[(InService, 0), (Surplus, 0), (InService, 0)]);
    pods[1].is_marked = true;
    let pool = ScaledPool {
        kind: Deployment,
        desired: 1,
        replicas: None,
        published: 2,
        pods: &pods,
        is_rolling_out: true,
    };
    assert_eq!(plan(&pool, &mut settled(), 1, SETTLE).number, 2);
}

#[test]
fn a_stateful_set_falls_to_the_highest_ordinal_with_a_call() {
    let stages = [(InService, 1), (Surplus, 0), (Surplus, 1), (Surplus, 0), (Surplus, 0)];
    assert_eq!(plan_for(StatefulSet, 1, &pods(&stages)).number, 3);
    let retired = plan_for(StatefulSet, 1, &pods(&[(InService, 0), (InService, 1), (Starting, 0)]));
    assert_eq!((texts(&retired.retire), retired.number), (vec!["agent-2", "agent-1"], 3));
    let below = plan_for(StatefulSet, 2, &pods(&[(InService, 0), (Surplus, 0), (InService, 0)]));
    assert_eq!((texts(&below.restore), below.number), (vec!["agent-1"], 3));
    // A requested drain may end at any time: no pod below it can be removed.
    let drained =
        plan_for(StatefulSet, 1, &pods(&[(InService, 0), (InService, 0), (OutOfService, 0)]));
    assert_eq!((drained.retire.len(), drained.number), (0, 3));
}

#[test]
fn pods_out_of_service_are_replaced() {
    let stages = [(InService, 1), (OutOfService, 0), (Terminating, 0)];
    assert_eq!(plan_for(Deployment, 3, &pods(&stages)).number, 4);
}

#[test]
fn demand_returns_surplus_pods_that_no_number_removes() {
    let mut pods = pods(&[(InService, 1), (Surplus, 0), (Surplus, 0), (Surplus, 1)]);
    pods[2].is_marked = true;
    let pool = |kind| ScaledPool {
        kind,
        desired: 4,
        replicas: None,
        published: 3,
        pods: &pods,
        is_rolling_out: false,
    };
    let mut memory = settled();
    memory.published(3, 4, 90, SETTLE);
    assert!(
        plan(&pool(StatefulSet), &mut memory, 95, SETTLE).number == 4,
        "the number rises first"
    );
    memory.published(4, 4, 100, SETTLE);
    let restored = |memory: &mut ScaleMemory, kind, now| {
        let planned = plan(&pool(kind), memory, now, SETTLE);
        assert_eq!(planned.number, 4);
        texts(&planned.restore).join(" ")
    };
    assert_eq!(restored(&mut memory, Deployment, 200), "agent-3 agent-1");
    assert_eq!(restored(&mut memory, StatefulSet, 200), "agent-1 agent-2");
    let later = 100 + SETTLE;
    assert_eq!(restored(&mut memory, Deployment, later), "agent-3 agent-1 agent-2");
    assert_eq!(restored(&mut memory, StatefulSet, later), "agent-1 agent-2 agent-3");
    // A new leader does not know the last number. After a clock step backwards it still settles.
    let mut memory = ScaleMemory::new(1_000_000, SETTLE);
    memory.published(4, 4, 1_000_000, SETTLE);
    assert_eq!(restored(&mut memory, StatefulSet, 5), "");
    assert_eq!(restored(&mut memory, StatefulSet, 5 + SETTLE), "agent-1 agent-2 agent-3");
}

/// A workload with its controller and calls. The controller reads the published number, and acts on
/// it later, but before it settles.
struct World {
    kind: WorkloadKind,
    cap: usize,
    pods: Vec<ScaledPod>,
    memory: ScaleMemory,
    now: Millis,
    published: u64,
    /// The scaler writes the replicas itself: the controller acts at once.
    is_direct: bool,
    /// The number that the controller has read, and when.
    read: Option<(u64, Millis)>,
    created: u32,
    desired: u64,
}

impl World {
    fn new(dice: &mut Dice) -> Self {
        let kind = [Deployment, StatefulSet][dice.roll(2)];
        let now = 1_000_000;
        let mut world = Self {
            kind,
            cap: 1 + dice.roll(3),
            pods: Vec::new(),
            memory: ScaleMemory::new(now, SETTLE),
            now,
            published: 3,
            is_direct: dice.roll(2) == 0,
            read: None,
            created: 0,
            desired: 3,
        };
        world.act(3, dice);
        world
    }

    fn live(&self) -> usize {
        self.pods.iter().map(|pod| pod.calls).sum()
    }

    /// Plans, and carries the steps out; some of them fail.
    fn scale(&mut self, dice: &mut Dice) -> u64 {
        let pool = ScaledPool {
            kind: self.kind,
            desired: self.desired,
            replicas: self.is_direct.then_some(self.published),
            published: self.published,
            pods: &self.pods,
            is_rolling_out: false,
        };
        let planned = plan(&pool, &mut self.memory, self.now, SETTLE);
        self.published = planned.number;
        self.memory.published(planned.number, planned.pods, self.now, SETTLE);
        let mut change = |names: &[PodName], change: fn(&mut ScaledPod)| {
            for pod in self.pods.iter_mut().filter(|pod| names.contains(&pod.name)) {
                if dice.roll(8) > 0 {
                    change(pod);
                }
            }
        };
        change(&planned.retire, |pod| pod.stage = Surplus);
        change(&planned.mark, |pod| pod.is_marked = true);
        change(&planned.unmark, |pod| pod.is_marked = false);
        change(&planned.restore, |pod| {
            pod.is_marked = false;
            pod.stage = if pod.is_ready { InService } else { Starting };
        });
        planned.number
    }

    /// Creates or removes pods as the controllers of Kubernetes do.
    fn act(&mut self, number: u64, dice: &mut Dice) {
        while (self.pods.len() as u64) < number {
            let ordinal = match self.kind {
                Deployment => self.created,
                StatefulSet => self.pods.len() as u32,
            };
            self.created += 1;
            self.pods.push(pod(ordinal, Starting, 0));
        }
        while self.pods.len() as u64 > number {
            let last = match self.kind {
                StatefulSet => self.pods.len() - 1,
                Deployment => {
                    let order = |index: &usize| {
                        let pod: &ScaledPod = &self.pods[*index];
                        (pod.is_ready, !pod.is_marked, (pod.created_at * 7) % 5)
                    };
                    let first = (0..self.pods.len()).min_by_key(order);
                    first.unwrap_or_default()
                }
            };
            let removed = self.pods.remove(last);
            assert_eq!(removed.calls, 0, "a call was cut: {removed:?} of {:?}", self.pods);
            let is_serving = removed.stage == InService;
            assert!(!is_serving, "a pod in service was removed: {removed:?}");
            let _ = dice.roll(2);
        }
    }

    fn step(&mut self, dice: &mut Dice) {
        self.now += 1 + dice.roll(3_000) as Millis;
        match self.read {
            _ if self.is_direct => self.act(self.published, dice),
            // The action on a number is never later than the time in which it settles.
            Some((number, at)) if dice.roll(3) == 0 || self.now + 3_100 > at + SETTLE => {
                if self.now < at + SETTLE {
                    self.act(number, dice);
                }
                self.read = None;
            }
            Some(_) => {}
            None => self.read = Some((self.published, self.now)),
        }
        match dice.roll(6) {
            0 => {
                let least = self.live().div_ceil(self.cap) as u64;
                self.desired = least.max(dice.roll(12) as u64);
            }
            1 | 2 => {
                let (cap, index) = (self.cap, dice.roll(self.pods.len().max(1)));
                let mut free =
                    self.pods.iter_mut().filter(|pod| pod.stage == InService && pod.calls < cap);
                if let Some(pod) = free.nth(index / 3) {
                    pod.calls += 1;
                    let least = self.live().div_ceil(self.cap) as u64;
                    self.desired = self.desired.max(least);
                }
            }
            3 => {
                let index = dice.roll(self.pods.len().max(1));
                if let Some(pod) = self.pods.get_mut(index) {
                    pod.calls = pod.calls.saturating_sub(1);
                }
            }
            4 => self.start_one(),
            // A new leader.
            _ if dice.roll(10) == 0 => self.memory = ScaleMemory::new(self.now, SETTLE),
            _ => {}
        }
        self.scale(dice);
    }

    fn start_one(&mut self) {
        if let Some(pod) = self.pods.iter_mut().find(|pod| !pod.is_ready) {
            pod.is_ready = true;
            if pod.stage == Starting {
                pod.stage = InService;
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn no_published_number_cuts_a_call_and_the_workload_converges(seed in any::<u64>()) {
        let mut dice = Dice(seed);
        let mut world = World::new(&mut dice);
        for _ in 0..250 {
            world.step(&mut dice);
        }
        for pod in &mut world.pods {
            pod.calls = 0;
        }
        for _ in 0..120 {
            world.now += SETTLE / 4;
            world.start_one();
            let number = world.scale(&mut dice);
            world.act(number, &mut dice);
        }
        let serving = world.pods.iter().filter(|pod| pod.stage == InService).count();
        prop_assert_eq!((serving, world.pods.len()), (world.desired as usize, world.desired as usize));
    }
}
