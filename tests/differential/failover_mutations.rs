//! Broken builds of failover and of the return of calls: description, text of the library,
//! replacement. All descriptions begin with `failover`.

pub(crate) const FAILOVER_MUTATIONS: [(&str, &str, &str); 22] = [
    (
        "failover: the retries are not limited",
        "is_lost and ordinal_of(record) > tonumber(max_retries)",
        "false",
    ),
    (
        "failover: a pod that was never reached uses a retry",
        "local is_lost = cause ~= 'unreachable'",
        "local is_lost = true",
    ),
    (
        "failover: the stream stays on its pod",
        "local other, tried = choose_pod(steps, record.pod_name)",
        "local other, tried = nil, ''",
    ),
    (
        "failover: the former pod keeps the call",
        "    run('ZREM', pod.calls_key, call)\n    pod.calls, pod.has_lost_call",
        "    pod.calls, pod.has_lost_call",
    ),
    (
        "failover: a lost pod has not failed",
        "local service_changed = pod and record_call_outcome(pod, cause, lasted(record.at))",
        "local service_changed = false",
    ),
    (
        "failover: the reason of a failed pod is not recorded",
        "  record_pod_failure(call, record, reason)\n  local service_changed",
        "  local service_changed",
    ),
    (
        "failover: the reason of a detach is not recorded",
        "  record_pod_failure(call, record, reason)\n  return end_released",
        "  return end_released",
    ),
    (
        "failover: a stream that stays on its pod has an event",
        "  if next_pod.name ~= former then\n",
        "  if true then\n",
    ),
    (
        "failover: a repeat moves the stream again",
        "if attached.id == next_stream then",
        "if false then",
    ),
    (
        "failover: a released call moves",
        "if attached.ending ~= '' and attached.ending ~= 'displaced' then",
        "if false then",
    ),
    (
        "failover: the former gateway keeps the call",
        "if attached.gateway ~= gateway then run_index('ZREM', K.gateway .. attached.gateway, call) end",
        "",
    ),
    ("failover: lost pods are not counted", "(is_lost and 1 or 0)", "0"),
    (
        "failover: a pod out of service is used again",
        "pod and pod.tier and is_serving(pod) and kind_of(pod.tier)",
        "pod and pod.tier and kind_of(pod.tier)",
    ),
    (
        "failover: a returning call has all retries again",
        "return max(1, request.previous.pod_attempt) + failovers > request.previous.max_retries",
        "return max(1, request.previous.pod_attempt) > request.previous.max_retries",
    ),
    (
        "failover: the call history has no failovers",
        "if (tonumber(failovers) or 0) > 0 or number ~= '' then",
        "if number ~= '' then",
    ),
    (
        "failover: a call whose gateway is lost gets another pod",
        "request.keeps_pod, request.keeps_leaving = record.pod_name, true",
        "",
    ),
    (
        "failover: a call whose gateway was lost gets another pod",
        "if call_end and (call_end.cause == 'gateway' or call_end.cause == 'unattached') then",
        "if false then",
    ),
    (
        "failover: the gateway is not asked how the stream ended",
        "      end_stream(request.call, record, attached, 'stream')\n",
        "",
    ),
    (
        "failover: a report of the provider is the cause of the end",
        "return is_final[attached.ending] and attached.ending or otherwise",
        "return attached.ending ~= '' and attached.ending or otherwise",
    ),
    (
        "failover: the earlier stream leaves its pod",
        "if attached.ending == '' and tonumber(attached.since) <= since then",
        "if attached.ending == '' and tonumber(attached.since) > since then",
    ),
    (
        "failover: the later stream gets no order to move",
        "if attached.ending == '' then order_stream(call, record, attached, 'displaced') end",
        "",
    ),
    (
        "failover: a call without a stream stays on a pod that is given back",
        "      end_call(pod, call, record, 'unattached')\n",
        "",
    ),
];
