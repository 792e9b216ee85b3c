//! The faults, one cell each, and the broken build that each has to catch.

use std::time::Duration;

use super::{
    callers::{Odd, Style, USUAL},
    cell::{Broken, Cell},
    census::SOON,
    crowd,
    deployment::ROUTERS,
    faults::{
        expire_watches, fill_memory, follows, forget_functions, is_replaced, kill, kill_leader,
        lose_primary, mistake_types, pause_leader, replace_pods, set_back_redis, shift_clock,
        some_pod, two_leaders,
    },
    history::What,
    store::{INSIDE, Kind},
};

use testkit::proxy::Moment;

const OWNERSHIP: Broken = Broken::Edit(&[(
    "    if stems_from ~= '' then return {'not_found', now} end\n",
    "    if on ~= '' then run('DEL', K.pod_calls .. on) local f = facts_of(on) if f then place(f) end end\n",
)]);
const OWNERSHIP_SAYS: &str = "a release frees the pod it names, whosever call is there";
const TAKE_BACK: Broken = Broken::Edit(&[("    if rest ~= '' then\n", "    if true then\n")]);
const TAKE_BACK_SAYS: &str = "what a caller never learnt of is not taken back";
const PROCEDURE_SAYS: &str = "many commands, one after the other";
const FENCE: Broken = Broken::Edit(&[
    ("if epoch < current then", "if false then"),
    ("if not_after ~= '0' and now > tonumber(not_after) then return {'late', now} end", ""),
]);
const FENCE_SAYS: &str = "leaders write whatever their epoch, and however late";

const PLAIN: Cell = Cell {
    name: "",
    says: "",
    backend: Kind::Plain,
    settings: &[],
    style: USUAL,
    allowed: SOON,
    fault: |_| {},
    broken: Broken::Procedure,
    broken_says: PROCEDURE_SAYS,
};

pub(crate) static CELLS: [Cell; 38] = [
    Cell {
        name: "kill-before-sending",
        says: "kill -9 of a router that is about to ask Redis",
        fault: |scene| kill(scene, Moment::BeforeSending),
        broken: Broken::Procedure,
        ..PLAIN
    },
    Cell {
        name: "kill-after-sending",
        says: "kill -9 of a router whose request is with Redis",
        settings: &[("LEASE_TTL", "3s")],
        style: Style { retries: 0, twins: 0, replays: 0, ..USUAL },
        fault: |scene| kill(scene, Moment::AfterSending),
        allowed: Duration::from_secs(7),
        broken: Broken::Edit(&[("if f then resettle(f, speaks_for(f, cause, time)) end", "")]),
        broken_says: "a lease that ends does not free its pod",
        ..PLAIN
    },
    Cell {
        name: "kill-after-reply",
        says: "kill -9 of a router that has just heard from Redis",
        settings: &[("LEASE_TTL", "3s")],
        style: Style { retries: 0, twins: 0, replays: 0, ..USUAL },
        fault: |scene| kill(scene, Moment::AfterReply),
        allowed: Duration::from_secs(7),
        broken: Broken::Edit(&[("if f then resettle(f, speaks_for(f, cause, time)) end", "")]),
        broken_says: "a lease that ends does not free its pod",
        ..PLAIN
    },
    Cell {
        name: "same-id-at-once",
        says: "one call id 2–10 times at once across replicas",
        style: Style { twins: 100, ..USUAL },
        fault: |scene| scene.pause(1_200, 1_800),
        ..PLAIN
    },
    Cell {
        name: "release-before-allocate",
        says: "a release comes before its call, in the name of a pod of others",
        style: Style { early: 60, hold: (20, 250), ..USUAL },
        fault: |scene| scene.pause(1_200, 1_800),
        broken: OWNERSHIP,
        broken_says: OWNERSHIP_SAYS,
        ..PLAIN
    },
    Cell {
        name: "replays",
        says: "webhooks and releases are repeated, in time and afterwards",
        style: Style { replays: 100, ..USUAL },
        fault: |scene| scene.pause(1_200, 1_800),
        broken: OWNERSHIP,
        broken_says: OWNERSHIP_SAYS,
        ..PLAIN
    },
    Cell {
        name: "late-releases",
        says: "a release comes when the lease has ended and the pod has another call",
        settings: &[("LEASE_TTL", "1s")],
        style: Style { late: 40, renews: false, clients: 12, hold: (20, 400), ..USUAL },
        fault: |scene| scene.pause(3_000, 3_500),
        broken: OWNERSHIP,
        broken_says: OWNERSHIP_SAYS,
        ..PLAIN
    },
    Cell {
        name: "drain-against-all",
        says: "allocate against drain against release against pods that rest, terminate and go",
        settings: &[("LEASE_TTL", "2s")],
        style: Style { drains: true, churn: true, clients: 10, ..USUAL },
        fault: |scene| scene.pause(1_800, 2_500),
        broken: Broken::Edit(&[(
            "if run('EXISTS', draining_key) == 1 then f.draining = true end",
            "",
        )]),
        broken_says: "a release puts a draining pod back",
        ..PLAIN
    },
    Cell {
        name: "redis-restarted-with-data",
        says: "Redis is killed and comes back with what it knew",
        backend: Kind::Durable,
        settings: &[("LEASE_TTL", "2s")],
        style: Style { long: 30, ..USUAL },
        fault: |scene| {
            scene.pause(200, 400);
            scene.deployment.history.fault("Redis is killed");
            scene.deployment.store().restart();
            scene.pause(300, 500);
        },
        ..PLAIN
    },
    Cell {
        name: "redis-restarted-empty",
        says: "Redis is killed and comes back with nothing",
        style: Style { long: 40, ..USUAL },
        fault: |scene| {
            scene.pause(200, 400);
            // What is on its way then may still be from before.
            scene.deployment.history.note(scene.deployment.history.now(), What::Wiped);
            scene.deployment.store().restart();
            scene.deployment.history.note(scene.deployment.history.now(), What::Wiped);
            scene.pause(1_300, 1_500);
        },
        ..PLAIN
    },
    Cell {
        name: "redis-gone",
        says: "Redis is gone for longer than a lease (stopped)",
        settings: &[("LEASE_TTL", "2s")],
        style: Style { long: 30, ..USUAL },
        fault: |scene| {
            for _ in 0..2 {
                scene.pause(200, 400);
                scene.deployment.history.fault("Redis stops");
                scene.deployment.store().servers[0].signal("STOP");
                scene.pause(2_000, 3_000);
                scene.deployment.store().servers[0].signal("CONT");
            }
        },
        ..PLAIN
    },
    Cell {
        name: "sentinel-kill",
        says: "failover: the primary is killed",
        backend: Kind::Sentinels,
        fault: |scene| {
            scene.pause(200, 400);
            lose_primary(scene, "the primary is killed", |store| store.servers[0].kill());
            is_replaced(scene);
            scene.pause(1_000, 1_500);
        },
        broken: Broken::NoSentinel,
        broken_says: "does not ask Sentinels, no min-replicas",
        ..PLAIN
    },
    Cell {
        name: "sentinel-pause",
        says: "failover: the primary sleeps and wakes up",
        backend: Kind::Sentinels,
        fault: |scene| {
            scene.pause(200, 400);
            lose_primary(scene, "the primary sleeps", |store| store.servers[0].signal("STOP"));
            is_replaced(scene);
            scene.pause(1_000, 2_000);
            scene.deployment.store().servers[0].signal("CONT");
            follows(scene);
        },
        broken: Broken::NoSentinel,
        broken_says: "does not ask Sentinels, no min-replicas",
        ..PLAIN
    },
    Cell {
        name: "sentinel-cut",
        says: "failover: the primary is cut off from replicas and Sentinels, not from routers",
        backend: Kind::Sentinels,
        fault: |scene| {
            scene.pause(200, 400);
            lose_primary(scene, "the primary is cut off", |store| {
                store.proxies[0].cut_from(INSIDE);
            });
            is_replaced(scene);
            scene.pause(1_000, 2_000);
            scene.deployment.store().proxies[0].heal();
            follows(scene);
        },
        broken: Broken::NoSentinel,
        broken_says: "does not ask Sentinels, no min-replicas",
        ..PLAIN
    },
    Cell {
        name: "network-slow",
        says: "50–2,000 ms to Redis",
        fault: |scene| {
            scene.pause(200, 400);
            scene.deployment.history.fault("the network is slow");
            for (least, most) in [(50, 250), (100, 500), (50, 2_000)] {
                let limits = (Duration::from_millis(least), Duration::from_millis(most));
                for seat in &scene.deployment.seats {
                    seat.to_redis.set(|faults| faults.delay = Some(limits));
                }
                scene.pause(600, 800);
            }
        },
        broken: TAKE_BACK,
        broken_says: TAKE_BACK_SAYS,
        ..PLAIN
    },
    Cell {
        name: "network-reset",
        says: "lines to Redis are reset",
        fault: |scene| {
            for _ in 0..12 {
                scene.pause(20, 200);
                scene.deployment.history.fault("a line is reset");
                scene.deployment.seats[scene.roll(ROUTERS)].to_redis.reset();
            }
        },
        ..PLAIN
    },
    Cell {
        name: "network-half-open",
        says: "what is sent to Redis arrives long after",
        fault: |scene| {
            scene.pause(200, 400);
            let seat = &scene.deployment.seats[scene.roll(ROUTERS)];
            scene.deployment.history.fault("a line stalls");
            seat.to_redis.stall_connections();
            scene.pause(1_200, 1_800);
        },
        broken: Broken::Edit(&[(
            "if not_after ~= '0' and now > tonumber(not_after) then return {'late', now} end",
            "",
        )]),
        broken_says: "what comes too late is done all the same",
        ..PLAIN
    },
    Cell {
        name: "reply-lost",
        says: "Redis does it and the answer is lost",
        fault: |scene| {
            for _ in 0..2 {
                scene.pause(200, 400);
                scene.deployment.history.fault("answers are lost");
                let lose = |lose| {
                    for seat in &scene.deployment.seats {
                        seat.to_redis.set(|faults| faults.lose_answers = lose);
                    }
                };
                lose(true);
                scene.pause(900, 1_400);
                lose(false);
            }
        },
        broken: TAKE_BACK,
        broken_says: TAKE_BACK_SAYS,
        ..PLAIN
    },
    Cell {
        name: "callers-hang-up",
        says: "callers hang up before the answer is there, and Redis is slow",
        style: Style { impatient: 50, clients: 10, ..USUAL },
        fault: |scene| {
            for seat in &scene.deployment.seats {
                // (longer than they wait)
                let limits = (Duration::from_millis(40), Duration::from_millis(60));
                seat.to_redis.set(|faults| faults.delay = Some(limits));
            }
            scene.pause(1_200, 1_800);
        },
        broken: TAKE_BACK,
        broken_says: TAKE_BACK_SAYS,
        ..PLAIN
    },
    Cell {
        name: "kill-while-waiting",
        says: "kill -9 of routers whose callers wait for a pod",
        settings: &[
            ("LEASE_TTL", "3s"),
            ("HOLD_TIME", "3s"),
            ("HOLD_POLL", "1s"),
            ("PUBLIC_URL", "http://router.example.com"),
        ],
        style: Style { waits: true, clients: 24, rest: 2, hold: (20, 300), ..USUAL },
        fault: |scene| kill(scene, Moment::AfterReply),
        allowed: Duration::from_secs(9),
        broken: Broken::Edit(&[(
            "place.merchant, place.tried)\n  f.calls = f.calls + 1\n",
            "place.merchant, place.tried)\n",
        )]),
        broken_says: "a call that is handed a pod does not count there",
        ..PLAIN
    },
    Cell {
        name: "stall-with-a-crowd",
        says: "Redis stalls with 1,000 waiting and 1,000 provisional calls, 2–6 ms away",
        settings: &[
            ("TIER_CONFIG", crowd::TIERS),
            ("CONNECT_TIMEOUT", "6s"),
            ("HOLD_TIME", "1m"),
            ("HOLD_POLL", "2s"),
            ("HOLD_MAX", "3000"),
            ("HOLD_MAX_PER_MERCHANT", "3000"),
            ("PUBLIC_URL", "http://router.example.com"),
        ],
        style: Style { waits: true, clients: 6, hold: (20, 300), ..USUAL },
        fault: crowd::stall,
        allowed: Duration::from_secs(14),
        broken: Broken::Edit(&[(
            "  bound = bound ~= '' and tonumber(bound) or now",
            "  bound = now",
        )]),
        broken_says: "the bound of a recovery moves with the clock",
        ..PLAIN
    },
    Cell {
        name: "clock-ahead",
        says: "a router's clock is 5 min ahead",
        fault: |scene| shift_clock(scene, 300),
        broken: Broken::OwnClock,
        broken_says: "deadlines by the router's own clock",
        ..PLAIN
    },
    Cell {
        name: "clock-behind",
        says: "a router's clock is 5 min behind",
        fault: |scene| shift_clock(scene, -300),
        broken: Broken::OwnClock,
        broken_says: "deadlines by the router's own clock",
        ..PLAIN
    },
    Cell {
        name: "redis-clock-back",
        says: "Redis's clock is set back by 5 min",
        backend: Kind::Clocked,
        settings: &[("LEASE_TTL", "3s")],
        style: Style { retries: 0, twins: 0, replays: 0, ..USUAL },
        fault: |scene| set_back_redis(scene, 300),
        allowed: Duration::from_secs(7),
        broken: Broken::Edit(&[(" or not bound(most, longest_lease) then", " or true then")]),
        broken_says: "leases last longer by the step",
    },
    Cell {
        name: "leader-paused",
        says: "the leader sleeps beyond its lease and wakes up",
        fault: pause_leader,
        broken: FENCE,
        broken_says: FENCE_SAYS,
        ..PLAIN
    },
    Cell {
        name: "leader-killed",
        says: "kill -9 of the leader, and pods leave before another leads",
        settings: &[("LEADER_ELECTION_DURATION", "4s"), ("LEADER_ELECTION_RENEW_DEADLINE", "3s")],
        fault: kill_leader,
        broken: Broken::Surroundings,
        broken_says: "only the leader watches the pods",
        ..PLAIN
    },
    Cell {
        name: "two-leaders",
        says: "another leader begins while the first still believes that it leads",
        fault: two_leaders,
        broken: FENCE,
        broken_says: FENCE_SAYS,
        ..PLAIN
    },
    Cell {
        name: "watch-dropped",
        says: "events of the cluster never arrive",
        settings: &[("RECONCILE_INTERVAL", "2s")],
        fault: |scene| {
            scene.deployment.kube.faults(|faults| faults.lose = true);
            scene.deployment.history.fault("events are lost");
            replace_pods(scene, false);
            scene.deployment.kube.faults(|faults| faults.lose = false);
        },
        broken: Broken::Settings(&[("RECONCILE_INTERVAL", "1h")]),
        broken_says: "pods are never compared with the cluster",
        ..PLAIN
    },
    Cell {
        name: "watch-reordered",
        says: "an old event of a pod arrives after its end",
        fault: |scene| {
            for _ in 0..3 {
                scene.pause(100, 300);
                let pod = some_pod(scene, "gold");
                let was = scene.deployment.kube.pod(&pod);
                scene.deployment.remove_pod(&pod);
                // With another UID and a newer resource version it looks like a new pod.
                scene.deployment.kube.tell_again(was, scene.is_broken);
                scene.deployment.add_pod(&scene.deployment.new_pod("gold"));
            }
            scene.pause(300, 500);
        },
        broken: Broken::Surroundings,
        broken_says: "an old event is taken for one of a new pod",
        ..PLAIN
    },
    Cell {
        name: "watch-gone",
        says: "410 Gone",
        fault: expire_watches,
        broken: Broken::Surroundings,
        broken_says: "goes on after 410 as if nothing had been missed",
        ..PLAIN
    },
    Cell {
        name: "new-pod-old-name",
        says: "a new pod with an old name",
        style: Style { hold: (50, 400), clients: 10, ..USUAL },
        fault: |scene| {
            for _ in 0..6 {
                scene.pause(100, 250);
                let pod = some_pod(scene, "gold");
                scene.deployment.remove_pod_quietly(&pod);
                scene.deployment.add_pod(&pod);
            }
            scene.pause(300, 400);
        },
        broken: Broken::Edit(&[(
            "local replaced = known ~= '' and known ~= uid",
            "local replaced = false",
        )]),
        broken_says: "a new pod has the calls of the old",
        ..PLAIN
    },
    Cell {
        name: "wrong-type",
        says: "keys hold another type than they should",
        settings: &[("CLEANUP_INTERVAL", "2s")],
        fault: mistake_types,
        broken: Broken::Settings(&[("CLEANUP_INTERVAL", "1h")]),
        broken_says: "views are never derived again",
        ..PLAIN
    },
    Cell {
        name: "out-of-memory",
        says: "Redis is full",
        settings: &[("LEASE_TTL", "2s")],
        style: Style { hold: (50, 2_500), clients: 16, ..USUAL },
        fault: fill_memory,
        ..PLAIN
    },
    Cell {
        name: "no-function",
        says: "Redis forgets our functions",
        fault: forget_functions,
        broken: Broken::Surroundings,
        broken_says: "functions are loaded once",
        ..PLAIN
    },
    Cell {
        name: "slow-clients",
        says: "requests of one byte now and then",
        settings: &[("HTTP_READ_TIMEOUT", "1s")],
        style: Style { odd: Some(Odd::Slow), clients: 16, rest: 5, ..USUAL },
        fault: |scene| scene.pause(2_000, 2_500),
        broken: Broken::Settings(&[("HTTP_READ_TIMEOUT", "1h")]),
        broken_says: "requests may take as long as they like",
        ..PLAIN
    },
    Cell {
        name: "huge-bodies",
        says: "bodies of 100 KiB",
        style: Style { odd: Some(Odd::Huge), ..USUAL },
        fault: |scene| scene.pause(1_000, 1_500),
        ..PLAIN
    },
    Cell {
        name: "malformed-bodies",
        says: "bodies that make no sense",
        style: Style { odd: Some(Odd::Malformed), ..USUAL },
        fault: |scene| scene.pause(1_000, 1_500),
        ..PLAIN
    },
    Cell {
        name: "overload",
        says: "ten times what the store can take",
        settings: &[("LEASE_TTL", "2500ms")],
        style: Style { long: 60, ..USUAL },
        fault: |scene| super::overload::flood(scene.deployment, scene.is_broken),
        ..PLAIN
    },
];
