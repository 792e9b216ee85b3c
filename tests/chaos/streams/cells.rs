//! The cells with streams.

use std::time::Duration;

use super::{
    Scenario,
    faults::{cut_off_gateway, kill_gateway, kill_pods, slow_pods, stop_redis, wipe_store},
};
use crate::{
    cell::{Broken, Cell},
    cells::DEFAULT_CELL,
};

/// `MEDIA_LEASE` of the cells in which it ends.
const SHORT_LEASE: Duration = Duration::from_secs(3);
/// `MEDIA_LEASE` of the cells in which it does not end.
const LONG_LEASE: Duration = Duration::from_secs(6);

const DEFAULT_SCENARIO: Scenario = Scenario {
    pods: 8,
    callers: 5,
    call_ms: (300, 2_500),
    long_ms: (2_500, 5_000),
    long_share: 30,
    has_webhooks: false,
    opens_twice: false,
    provider_pause_ms: None,
    recovery_time: Duration::from_secs(5),
    fault: |_| {},
};

/// All pods are taken at times, so that a pod that is freed too early is allocated at once.
const FULL: Scenario = Scenario { pods: 6, callers: 8, ..DEFAULT_SCENARIO };

/// As many calls as pods, or fewer: a call that has to move finds a pod.
const ALMOST_FULL: Scenario = Scenario {
    pods: 7,
    callers: 6,
    call_ms: (500, 3_000),
    long_ms: (8_000, 12_000),
    long_share: 50,
    ..DEFAULT_SCENARIO
};

pub(crate) static CELLS: [Cell; 10] = [
    Cell {
        name: "stream-opened-twice",
        description: "every stream is opened a second time, at any gateway",
        streams: Some(&Scenario {
            opens_twice: true,
            fault: |fault| fault.pause(4_000, 5_000),
            ..DEFAULT_SCENARIO
        }),
        broken: Broken::Edit(&[(
            "if attached and attached.id ~= stream then return {'refused', now, 'already_attached'} end",
            "",
        )]),
        broken_description: "a second stream of a call is attached",
        ..DEFAULT_CELL
    },
    Cell {
        name: "stream-pod-killed",
        description: "pods are killed in mid-call",
        streams: Some(&Scenario { fault: kill_pods, ..DEFAULT_SCENARIO }),
        broken: Broken::Settings(&[("RETRY_ON_DISCONNECT", "0")]),
        broken_description: "no failover: a stream ends with its pod",
        ..DEFAULT_CELL
    },
    Cell {
        name: "stream-pod-killed-when-full",
        description: "pods are killed in mid-call, and few others are free",
        streams: Some(&Scenario { fault: kill_pods, ..ALMOST_FULL }),
        broken: Broken::Edit(&[(
            "    run('ZREM', pod.calls_key, call)\n    pod.calls, pod.has_lost_call = pod.calls - 1, true\n",
            "",
        )]),
        broken_description: "a failover does not free the pod that is lost",
        ..DEFAULT_CELL
    },
    Cell {
        name: "stream-gateway-killed",
        description: "kill -9 of a gateway with streams; callers come back through another one",
        settings: &[("MEDIA_LEASE", "3s")],
        streams: Some(&Scenario {
            has_webhooks: true,
            fault: |fault| kill_gateway(fault, SHORT_LEASE),
            ..DEFAULT_SCENARIO
        }),
        broken: Broken::Edit(&[(
            "if ends <= now then due[#due + 1] = {id = gateway, ends = ends} end",
            "",
        )]),
        broken_description: "the calls of a lost gateway do not end",
        ..DEFAULT_CELL
    },
    Cell {
        name: "stream-gateway-cut-off",
        description: "a gateway with streams is cut off from Redis for less than its lease",
        settings: &[("MEDIA_LEASE", "6s")],
        streams: Some(&Scenario {
            fault: |fault| cut_off_gateway(fault, LONG_LEASE, Duration::from_millis(3_800)),
            ..FULL
        }),
        broken: Broken::Edit(&[(
            "local longest = now + lease\n",
            "before = now - 1\n    local longest = now + lease\n",
        )]),
        broken_description: "the lease of a gateway ends with the next sweep",
        ..DEFAULT_CELL
    },
    Cell {
        name: "stream-gateway-cut-off-long",
        description: "a gateway with streams is cut off from Redis for longer than its lease, and its pods go to other calls",
        settings: &[("MEDIA_LEASE", "3s")],
        // Half of the pods are left for the calls that begin during the fault.
        streams: Some(&Scenario {
            callers: 4,
            call_ms: (12_000, 14_000),
            long_share: 0,
            fault: |fault| cut_off_gateway(fault, SHORT_LEASE, Duration::from_secs(6)),
            ..DEFAULT_SCENARIO
        }),
        broken: Broken::Edit(&[(
            "if attached.ending == '' then order_stream(call, record, attached, 'displaced') end",
            "",
        )]),
        broken_description: "two streams that meet on one pod both stay",
        ..DEFAULT_CELL
    },
    Cell {
        name: "stream-redis-gone",
        description: "Redis is stopped for longer than the leases of gateways, with streams",
        settings: &[("MEDIA_LEASE", "3s")],
        streams: Some(&Scenario {
            long_ms: (15_000, 18_000),
            long_share: 80,
            fault: |fault| stop_redis(fault, Duration::from_millis(11_500)),
            ..FULL
        }),
        broken: Broken::Edit(&[(
            "local has_gap = unswept > math.min(RULES.SWEEP_GAP, lease * 2 / 3)",
            "local has_gap = false",
        )]),
        broken_description: "an outage of Redis ends the leases of gateways",
        ..DEFAULT_CELL
    },
    Cell {
        name: "stream-slow-pod",
        description: "pods answer handshakes after 0.9 to 3 s, others stall in mid-stream",
        streams: Some(&Scenario { fault: slow_pods, ..DEFAULT_SCENARIO }),
        broken: Broken::Edit(&[("  if other then return other, tried end\n", "")]),
        broken_description: "a failover tries the same pod again",
        ..DEFAULT_CELL
    },
    Cell {
        name: "stream-slow-provider",
        description: "providers stop reading and sending for 2.5 to 4 s, with large echoes",
        streams: Some(&Scenario {
            provider_pause_ms: Some((2_500, 4_000)),
            call_ms: (13_000, 14_000),
            long_share: 0,
            fault: |fault| fault.pause(1_000, 2_000),
            ..DEFAULT_SCENARIO
        }),
        broken: Broken::Settings(&[("MEDIA_IDLE_TIMEOUT", "1s")]),
        broken_description: "a provider that stalls for a second counts as gone",
        ..DEFAULT_CELL
    },
    Cell {
        name: "stream-store-wiped",
        description: "Redis is wiped with streams attached",
        settings: &[("MEDIA_LEASE", "6s")],
        streams: Some(&Scenario { fault: |fault| wipe_store(fault, LONG_LEASE), ..ALMOST_FULL }),
        broken: Broken::Edit(&[(
            "return {'extended', now, ending, run('ZCARD', key), unknown}",
            "return {'extended', now, ending, 1000000, {}}",
        )]),
        broken_description: "gateways do not notice that the store has lost their streams",
        ..DEFAULT_CELL
    },
];
