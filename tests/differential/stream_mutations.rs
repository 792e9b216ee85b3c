//! Broken builds of media streams and gateways: description, text of the library, replacement.

pub(crate) const STREAM_MUTATIONS: [(&str, &str, &str); 27] = [
    (
        "a heartbeat knows every call",
        "if not run('ZSCORE', key, ARGV[i]) then unknown",
        "if false then unknown",
    ),
    (
        "the end of an attached call is not recorded",
        "if (attached or pod_attempt ~= '' or MAY_START_LATE[cause])",
        "if (pod_attempt ~= '' or MAY_START_LATE[cause])",
    ),
    (
        "a registered stream loses its merchant",
        "  return connected.merchant, pod\n",
        "  return '', pod\n",
    ),
    (
        "a stream of another pod attempt is attached",
        "if (tonumber(record.pod_attempt) or 0) ~= tonumber(pod_attempt) then",
        "if false then",
    ),
    (
        "a late stream of another pod attempt is attached",
        "if call_end.pod_attempt ~= tonumber(pod_attempt) then return",
        "if false then return",
    ),
    (
        "a second stream replaces the first",
        "if attached and attached.id ~= stream then return {'refused', now, 'already_attached'} end",
        "if attached and attached.id ~= stream then attached = nil end",
    ),
    (
        "a stream is attached to a handed-off call",
        "if record.stage == 'handed' then return {'refused', now, 'not_found'} end",
        "",
    ),
    (
        "an attached call stays provisional",
        "run('HSET', K.call .. call, 'stage', '', REQUEST_IDS, '', 'stream', text)",
        "run('HSET', K.call .. call, 'stream', text)",
    ),
    (
        "an attach does not extend the lease of the call",
        "set_deadline(pod, call, deadline, life, record.merchant_id)\n      if pod then place_calls",
        "if pod then place_calls",
    ),
    (
        "an attach is no heartbeat of its gateway",
        "set_gateway(gateway, now + tonumber(gateway_lease), gateway_lease)",
        "run('HSETNX', K.gateways, gateway, now + tonumber(gateway_lease) .. ' ' .. gateway_lease)",
    ),
    (
        "a late stream gets a pod with another call",
        "if pod and pod.calls < cap_of(pod) then return pod end",
        "if pod then return pod end",
    ),
    (
        "a late stream never gets another pod",
        "local chosen = steps and choose_pod(steps)",
        "local chosen",
    ),
    (
        "a gateway gets back a call whose pod has another call",
        "if pod and pod.tier and pod.calls < slots_of(pod) then return pod end",
        "if pod and pod.tier then return pod end",
    ),
    (
        "a gateway gets back a call that ended normally",
        "local was_cut_off = call_end.cause == 'gateway' or call_end.cause == 'lease'",
        "local was_cut_off = true",
    ),
    (
        "a gateway does not get back its calls",
        "call_end.cause == 'gateway' or call_end.cause == 'lease'",
        "call_end.cause == 'lease'",
    ),
    (
        "a detach ends the call of another stream",
        "if not attached or attached.id ~= stream then",
        "if not attached then",
    ),
    (
        "a detach replaces the cause of a release",
        "return end_released(call, record, end_cause_of(attached, cause))",
        "return end_released(call, record, cause)",
    ),
    (
        "an unreachable pod has no failure",
        "unconfirmed = true, unreachable = true, pod_lost",
        "unconfirmed = true, pod_lost",
    ),
    (
        "a release frees the pod of an attached call",
        "  if attached then return end_stream(call, record, attached, cause) end\n",
        "",
    ),
    (
        "a reconnect frees the pod of an attached call",
        "    if not request.previous.is_settled then\n",
        "    if false then\n",
    ),
    (
        "a second release replaces the cause of the first",
        "  if attached.ending == '' or is_final[cause] and not is_final[attached.ending] then\n",
        "  do\n",
    ),
    (
        "a heartbeat does not return released calls",
        "'ZRANGEBYSCORE', key, '1', '+inf'",
        "'ZRANGEBYSCORE', key, '2', '+inf'",
    ),
    (
        "an ended call stays with its gateway",
        "  if attached then run_index('ZREM', K.gateway .. attached.gateway, call) end\n",
        "",
    ),
    (
        "a gap without sweeps does not extend the leases of gateways",
        "local has_gap = unswept > math.min(RULES.SWEEP_GAP, lease * 2 / 3)",
        "local has_gap = false",
    ),
    ("a sweep ends more calls of gateways than its limit", "    limit = limit - #calls\n", ""),
    (
        "a released call of a lost gateway ends with the wrong cause",
        "expire_call(call, record, end_cause_of(attached, 'gateway'), expired)",
        "expire_call(call, record, 'gateway', expired)",
    ),
    (
        "a stream that never came is a failure of the pod",
        "unattached = 'unattached'}",
        "unattached = 'unconfirmed'}",
    ),
];
