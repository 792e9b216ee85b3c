//! The chaos matrix: one cell per fault, with the broken build that it must detect.

use std::time::Duration;

use super::{
    broken::{
        BASELINE_DESCRIPTION, NO_COMPENSATION, NO_COMPENSATION_DESCRIPTION, NO_FENCING,
        NO_FENCING_DESCRIPTION, NO_LEASE_END, NO_LEASE_END_DESCRIPTION, NO_OWNER_CHECK,
        NO_OWNER_CHECK_DESCRIPTION,
    },
    callers::{BadRequest, DEFAULT_WORKLOAD, Workload},
    cell::{Broken, Cell},
    deployment::ROUTERS,
    faults::{
        drop_replies, expire_watches, fill_memory, flush_functions, kill, kill_leader,
        lose_primary, overwrite_types, pause_leader, random_pod, replace_pods, replay_events,
        shift_clock, slow_network, step_redis_clock_back, two_leaders, wait_for_failover,
        wait_for_rejoin,
    },
    final_check::MAX_RECOVERY_TIME,
    history::Action,
    many_calls,
    store::{BackendKind, REDIS_SOURCE},
};

use testkit::proxy::KillPoint;

pub(crate) const DEFAULT_CELL: Cell = Cell {
    name: "",
    description: "",
    backend: BackendKind::Plain,
    settings: &[],
    workload: DEFAULT_WORKLOAD,
    recovery_time: MAX_RECOVERY_TIME,
    fault: |_| {},
    streams: None,
    broken: Broken::Baseline,
    broken_description: BASELINE_DESCRIPTION,
};

pub(crate) static CELLS: [Cell; 38] = [
    Cell {
        name: "kill-before-sending",
        description: "kill -9 of a router before it sends a request to Redis",
        fault: |context| kill(context, KillPoint::BeforeSend),
        broken: Broken::Baseline,
        ..DEFAULT_CELL
    },
    Cell {
        name: "kill-after-sending",
        description: "kill -9 of a router after it has sent a request to Redis",
        settings: &[("LEASE_TTL", "3s")],
        workload: Workload { retries: 0, concurrent: 0, repeats: 0, ..DEFAULT_WORKLOAD },
        fault: |context| kill(context, KillPoint::AfterSend),
        recovery_time: Duration::from_secs(7),
        broken: NO_LEASE_END,
        broken_description: NO_LEASE_END_DESCRIPTION,
        ..DEFAULT_CELL
    },
    Cell {
        name: "kill-after-reply",
        description: "kill -9 of a router after a reply from Redis",
        settings: &[("LEASE_TTL", "3s")],
        workload: Workload { retries: 0, concurrent: 0, repeats: 0, ..DEFAULT_WORKLOAD },
        fault: |context| kill(context, KillPoint::AfterReply),
        recovery_time: Duration::from_secs(7),
        broken: NO_LEASE_END,
        broken_description: NO_LEASE_END_DESCRIPTION,
        ..DEFAULT_CELL
    },
    Cell {
        name: "same-id-at-once",
        description: "2–10 concurrent requests with one call id across replicas",
        workload: Workload { concurrent: 100, ..DEFAULT_WORKLOAD },
        fault: |context| context.pause(1_200, 1_800),
        ..DEFAULT_CELL
    },
    Cell {
        name: "release-before-allocate",
        description: "a release with another call's pod arrives before its call",
        workload: Workload { early_releases: 60, call_ms: (20, 250), ..DEFAULT_WORKLOAD },
        fault: |context| context.pause(1_200, 1_800),
        broken: NO_OWNER_CHECK,
        broken_description: NO_OWNER_CHECK_DESCRIPTION,
        ..DEFAULT_CELL
    },
    Cell {
        name: "replays",
        description: "webhooks and releases are repeated during and after the call",
        workload: Workload { repeats: 100, ..DEFAULT_WORKLOAD },
        fault: |context| context.pause(1_200, 1_800),
        broken: NO_OWNER_CHECK,
        broken_description: NO_OWNER_CHECK_DESCRIPTION,
        ..DEFAULT_CELL
    },
    Cell {
        name: "late-releases",
        description: "a release arrives after the lease has ended and the pod serves another call",
        settings: &[("LEASE_TTL", "1s")],
        workload: Workload {
            late_releases: 40,
            renews: false,
            clients: 12,
            call_ms: (20, 400),
            ..DEFAULT_WORKLOAD
        },
        fault: |context| context.pause(3_000, 3_500),
        broken: NO_OWNER_CHECK,
        broken_description: NO_OWNER_CHECK_DESCRIPTION,
        ..DEFAULT_CELL
    },
    Cell {
        name: "drain-against-all",
        description: "concurrent allocations, drains, releases, and pods that become unready, terminate and disappear",
        settings: &[("LEASE_TTL", "2s")],
        workload: Workload { drains: true, churn: true, clients: 10, ..DEFAULT_WORKLOAD },
        fault: |context| context.pause(1_800, 2_500),
        broken: Broken::Edit(&[(
            "if run('EXISTS', draining_key) == 1 then pod.draining = true end",
            "",
        )]),
        broken_description: "a release returns a draining pod to its pool",
        ..DEFAULT_CELL
    },
    Cell {
        name: "redis-restarted-with-data",
        description: "Redis is killed and restarts with its data",
        backend: BackendKind::Durable,
        settings: &[("LEASE_TTL", "2s")],
        workload: Workload { long_calls: 30, ..DEFAULT_WORKLOAD },
        fault: |context| {
            context.pause(200, 400);
            context.deployment.history.fault("Redis is killed");
            context.deployment.store().restart();
            context.pause(300, 500);
        },
        ..DEFAULT_CELL
    },
    Cell {
        name: "redis-restarted-empty",
        description: "Redis is killed and restarts empty",
        workload: Workload { long_calls: 40, ..DEFAULT_WORKLOAD },
        fault: |context| {
            context.pause(200, 400);
            // Requests in flight may still return data from before the loss.
            context.deployment.history.record(context.deployment.history.now(), Action::StoreLost);
            context.deployment.store().restart();
            context.deployment.history.record(context.deployment.history.now(), Action::StoreLost);
            context.pause(1_300, 1_500);
        },
        ..DEFAULT_CELL
    },
    Cell {
        name: "redis-gone",
        description: "Redis is stopped for longer than a lease",
        settings: &[("LEASE_TTL", "2s")],
        workload: Workload { long_calls: 30, ..DEFAULT_WORKLOAD },
        fault: |context| {
            for _ in 0..2 {
                context.pause(200, 400);
                context.deployment.history.fault("Redis stops");
                context.deployment.store().servers[0].signal("STOP");
                context.pause(2_000, 3_000);
                context.deployment.store().servers[0].signal("CONT");
            }
        },
        ..DEFAULT_CELL
    },
    Cell {
        name: "sentinel-kill",
        description: "failover: the primary is killed",
        backend: BackendKind::Sentinels,
        fault: |context| {
            context.pause(200, 400);
            lose_primary(context, "the primary is killed", |store| store.servers[0].kill());
            wait_for_failover(context);
            context.pause(1_000, 1_500);
        },
        broken: Broken::NoSentinel,
        broken_description: "no Sentinel support, no min-replicas",
        ..DEFAULT_CELL
    },
    Cell {
        name: "sentinel-pause",
        description: "failover: the primary is paused and resumes",
        backend: BackendKind::Sentinels,
        fault: |context| {
            context.pause(200, 400);
            lose_primary(context, "the primary is paused", |store| store.servers[0].signal("STOP"));
            wait_for_failover(context);
            context.pause(1_000, 2_000);
            context.deployment.store().servers[0].signal("CONT");
            wait_for_rejoin(context);
        },
        broken: Broken::NoSentinel,
        broken_description: "no Sentinel support, no min-replicas",
        ..DEFAULT_CELL
    },
    Cell {
        name: "sentinel-cut",
        description: "failover: a partition separates the primary from replicas and Sentinels, not from routers",
        backend: BackendKind::Sentinels,
        fault: |context| {
            context.pause(200, 400);
            lose_primary(context, "the primary is partitioned", |store| {
                store.proxies[0].refuse_connections_from(REDIS_SOURCE);
            });
            wait_for_failover(context);
            context.pause(1_000, 2_000);
            context.deployment.store().proxies[0].heal();
            wait_for_rejoin(context);
        },
        broken: Broken::NoSentinel,
        broken_description: "no Sentinel support, no min-replicas",
        ..DEFAULT_CELL
    },
    Cell {
        name: "network-slow",
        description: "50–2,000 ms latency to Redis",
        fault: slow_network,
        broken: NO_COMPENSATION,
        broken_description: NO_COMPENSATION_DESCRIPTION,
        ..DEFAULT_CELL
    },
    Cell {
        name: "network-reset",
        description: "connections to Redis are reset",
        fault: |context| {
            for _ in 0..12 {
                context.pause(20, 200);
                context.deployment.history.fault("connections are reset");
                context.deployment.routers[context.roll(ROUTERS)].redis_proxy.reset_connections();
            }
        },
        ..DEFAULT_CELL
    },
    Cell {
        name: "network-half-open",
        description: "requests to Redis arrive late",
        fault: |context| {
            context.pause(200, 400);
            let router = &context.deployment.routers[context.roll(ROUTERS)];
            context.deployment.history.fault("connections stall");
            router.redis_proxy.stall_open_connections();
            context.pause(1_200, 1_800);
        },
        broken: Broken::Edit(&[(
            "if not_after ~= '0' and now > tonumber(not_after) then return {'late', now} end",
            "",
        )]),
        broken_description: "requests after their deadline are executed",
        ..DEFAULT_CELL
    },
    Cell {
        name: "reply-lost",
        description: "Redis executes the request and the reply is lost",
        fault: drop_replies,
        broken: NO_COMPENSATION,
        broken_description: NO_COMPENSATION_DESCRIPTION,
        ..DEFAULT_CELL
    },
    Cell {
        name: "callers-hang-up",
        description: "callers disconnect before the response, with a slow Redis",
        workload: Workload { disconnects: 50, clients: 10, ..DEFAULT_WORKLOAD },
        fault: |context| {
            for router in &context.deployment.routers {
                // The latency is longer than the disconnecting callers wait.
                let limits = (Duration::from_millis(40), Duration::from_millis(60));
                router.redis_proxy.set_faults(|faults| faults.latency = Some(limits));
            }
            context.pause(1_200, 1_800);
        },
        broken: NO_COMPENSATION,
        broken_description: NO_COMPENSATION_DESCRIPTION,
        ..DEFAULT_CELL
    },
    Cell {
        name: "kill-while-waiting",
        description: "kill -9 of routers with waiting calls",
        settings: &[
            ("LEASE_TTL", "3s"),
            ("HOLD_TIME", "3s"),
            ("HOLD_POLL", "1s"),
            ("PUBLIC_URL", "http://router.example.com"),
        ],
        workload: Workload {
            waits: true,
            clients: 24,
            pause_ms: 2,
            call_ms: (20, 300),
            ..DEFAULT_WORKLOAD
        },
        fault: |context| kill(context, KillPoint::AfterReply),
        recovery_time: Duration::from_secs(9),
        broken: Broken::Edit(&[(
            "entry.merchant, entry.tried)\n  pod.calls = pod.calls + 1\n",
            "entry.merchant, entry.tried)\n",
        )]),
        broken_description: "a handed-off call does not count on its pod",
        ..DEFAULT_CELL
    },
    Cell {
        name: "stall-with-many-calls",
        description: "Redis stalls with 1,000 waiting and 1,000 provisional calls and 2–6 ms latency",
        settings: &[
            ("TIER_CONFIG", many_calls::TIERS),
            ("CONNECT_TIMEOUT", "6s"),
            ("HOLD_TIME", "1m"),
            ("HOLD_POLL", "2s"),
            ("HOLD_MAX", "3000"),
            ("HOLD_MAX_PER_MERCHANT", "3000"),
            ("PUBLIC_URL", "http://router.example.com"),
        ],
        workload: Workload { waits: true, clients: 6, call_ms: (20, 300), ..DEFAULT_WORKLOAD },
        fault: many_calls::stall_redis,
        recovery_time: Duration::from_secs(14),
        broken: Broken::Edit(&[(
            "  bound = bound ~= '' and tonumber(bound) or now",
            "  bound = now",
        )]),
        broken_description: "the bound of a recovery moves with the clock",
        ..DEFAULT_CELL
    },
    Cell {
        name: "clock-ahead",
        description: "a router's clock is 5 min ahead",
        fault: |context| shift_clock(context, 300),
        broken: Broken::LocalClock,
        broken_description: "deadlines by the router's clock",
        ..DEFAULT_CELL
    },
    Cell {
        name: "clock-behind",
        description: "a router's clock is 5 min behind",
        fault: |context| shift_clock(context, -300),
        broken: Broken::LocalClock,
        broken_description: "deadlines by the router's clock",
        ..DEFAULT_CELL
    },
    Cell {
        name: "redis-clock-back",
        description: "Redis's clock steps back by 5 min",
        backend: BackendKind::AdjustableClock,
        settings: &[("LEASE_TTL", "3s")],
        workload: Workload { retries: 0, concurrent: 0, repeats: 0, ..DEFAULT_WORKLOAD },
        fault: |context| step_redis_clock_back(context, 300),
        recovery_time: Duration::from_secs(7),
        broken: Broken::Edit(&[(" or not bound(limit, longest_lease) then", " or true then")]),
        broken_description: "leases last longer by the step",
        ..DEFAULT_CELL
    },
    Cell {
        name: "leader-paused",
        description: "the leader is paused beyond its lease and resumes",
        fault: pause_leader,
        broken: NO_FENCING,
        broken_description: NO_FENCING_DESCRIPTION,
        ..DEFAULT_CELL
    },
    Cell {
        name: "leader-killed",
        description: "kill -9 of the leader, and pods terminate before the next leader",
        settings: &[("LEADER_ELECTION_DURATION", "4s"), ("LEADER_ELECTION_RENEW_DEADLINE", "3s")],
        fault: kill_leader,
        broken: Broken::Environment,
        broken_description: "only the leader watches pods",
        ..DEFAULT_CELL
    },
    Cell {
        name: "two-leaders",
        description: "a second leader starts while the first has not noticed the loss of its lease",
        fault: two_leaders,
        broken: NO_FENCING,
        broken_description: NO_FENCING_DESCRIPTION,
        ..DEFAULT_CELL
    },
    Cell {
        name: "watch-dropped",
        description: "events of the cluster are lost",
        settings: &[("RECONCILE_INTERVAL", "2s")],
        fault: |context| {
            context.deployment.kube.faults(|faults| faults.drop_events = true);
            context.deployment.history.fault("events are lost");
            replace_pods(context, false);
            context.deployment.kube.faults(|faults| faults.drop_events = false);
        },
        broken: Broken::Settings(&[("RECONCILE_INTERVAL", "1h")]),
        broken_description: "no reconciliation with the cluster",
        ..DEFAULT_CELL
    },
    Cell {
        name: "watch-reordered",
        description: "an outdated event of a pod arrives after its removal",
        fault: replay_events,
        broken: Broken::Environment,
        broken_description: "an outdated event counts as a new pod",
        ..DEFAULT_CELL
    },
    Cell {
        name: "watch-gone",
        description: "watches expire with 410 Gone",
        fault: expire_watches,
        broken: Broken::Environment,
        broken_description: "a watch continues after 410 without a new list",
        ..DEFAULT_CELL
    },
    Cell {
        name: "new-pod-old-name",
        description: "a new pod has the name of an old one",
        workload: Workload { call_ms: (50, 400), clients: 10, ..DEFAULT_WORKLOAD },
        fault: |context| {
            for _ in 0..6 {
                context.pause(100, 250);
                let pod = random_pod(context, "gold");
                context.deployment.remove_pod_quietly(&pod);
                context.deployment.add_pod(&pod);
            }
            context.pause(300, 400);
        },
        broken: Broken::Edit(&[(
            "local replaced = known_uid ~= '' and known_uid ~= uid",
            "local replaced = false",
        )]),
        broken_description: "a new pod inherits the calls of the old one",
        ..DEFAULT_CELL
    },
    Cell {
        name: "wrong-type",
        description: "keys have a wrong type",
        settings: &[("CLEANUP_INTERVAL", "2s")],
        fault: overwrite_types,
        broken: Broken::Settings(&[("CLEANUP_INTERVAL", "1h")]),
        broken_description: "no audit: indexes are never rebuilt",
        ..DEFAULT_CELL
    },
    Cell {
        name: "out-of-memory",
        description: "Redis is full",
        settings: &[("LEASE_TTL", "2s")],
        workload: Workload { call_ms: (50, 2_500), clients: 16, ..DEFAULT_WORKLOAD },
        fault: fill_memory,
        ..DEFAULT_CELL
    },
    Cell {
        name: "no-function",
        description: "Redis loses the function library",
        fault: flush_functions,
        broken: Broken::Environment,
        broken_description: "functions are loaded only once",
        ..DEFAULT_CELL
    },
    Cell {
        name: "slow-clients",
        description: "slow-loris requests",
        settings: &[("HTTP_READ_TIMEOUT", "1s")],
        workload: Workload {
            bad_requests: Some(BadRequest::Slow),
            clients: 16,
            pause_ms: 5,
            ..DEFAULT_WORKLOAD
        },
        fault: |context| context.pause(2_000, 2_500),
        broken: Broken::Settings(&[("HTTP_READ_TIMEOUT", "1h")]),
        broken_description: "no read timeout for requests",
        ..DEFAULT_CELL
    },
    Cell {
        name: "huge-bodies",
        description: "bodies of 100 KiB",
        workload: Workload { bad_requests: Some(BadRequest::Huge), ..DEFAULT_WORKLOAD },
        fault: |context| context.pause(1_000, 1_500),
        ..DEFAULT_CELL
    },
    Cell {
        name: "malformed-bodies",
        description: "malformed bodies",
        workload: Workload { bad_requests: Some(BadRequest::Malformed), ..DEFAULT_WORKLOAD },
        fault: |context| context.pause(1_000, 1_500),
        ..DEFAULT_CELL
    },
    Cell {
        name: "overload",
        description: "ten times the capacity of the store",
        settings: &[("LEASE_TTL", "2500ms")],
        workload: Workload { long_calls: 60, ..DEFAULT_WORKLOAD },
        fault: |context| super::overload::flood(context.deployment, context.is_broken),
        ..DEFAULT_CELL
    },
];
