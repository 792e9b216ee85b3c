//! Mutation test of the comparison: it must detect every one of these broken builds. `MUTATION`
//! selects those whose description contains a text.

use store::Functions;

use crate::{
    capacity::CAPACITY_MUTATIONS,
    compare::{Schema, compare},
    dial_scenario::compare_dials,
    dials::DIAL_MUTATIONS,
    failover_mutations::FAILOVER_MUTATIONS,
    scaling_mutations::SCALING_MUTATIONS,
    stream_mutations::STREAM_MUTATIONS,
    usual_case_mutations::USUAL_CASE_MUTATIONS,
    usual_case_series::compare_usual_case,
};

/// Broken builds: description, text of the library, replacement.
const MUTATIONS: [(&str, &str, &str); 62] = [
    (
        "used slots count as free",
        "free + pods * max(0, cap - tonumber(score))",
        "free + pods * cap",
    ),
    (
        "a pod that is no longer shared counts one of its calls",
        "sum == calls and 0 or #pools, COLUMNS",
        "0, COLUMNS",
    ),
    (
        "a pod at risk stays among the available ones",
        "    remove_from_index(pool_keys_of(pod.tier).available, pod.name)\n  elseif",
        "  elseif",
    ),
    (
        "a pod that is safe again stays among those at risk",
        "    run_index('ZREM', pool_keys_of(pod.tier).at_risk, pod.name)\n",
        "",
    ),
    ("pods at risk get no call", "pod = pod or draw_at_risk(tier, kind, avoid)", ""),
    ("a pod at risk counts as plain", "or pod.at_risk or pod.quarantined", "or pod.quarantined"),
    (
        "a release frees a call on another pod",
        "expected_pod ~= '' and expected_pod ~= pod_name\n    or",
        "",
    ),
    (
        "an ended call still counts",
        "is_removed and 1 or try('ZREM', calls_key, ending_call)\n",
        "try('ZSCORE', calls_key, ending_call) and 1 or 0\n",
    ),
    (
        "a busy exclusive pod stays available",
        "elseif serves and calls == 0 then",
        "elseif serves then",
    ),
    (
        "re-registration exceeds the cap of a pod",
        "if pod.calls >= slots_of(pod) then",
        "if pod.calls > slots_of(pod) then",
    ),
    (
        "a later drain shortens an earlier one",
        "max(pod.draining and current or 0, now + tonumber(time))",
        "now + tonumber(time)",
    ),
    ("a replaced pod keeps its calls", "if replaced or known_uid", "if known_uid"),
    ("a replaced leader may write", "if epoch < current then", "if epoch + 1 < current then"),
    (
        "a renewal re-registers an ended call",
        "if now < trusting_until and run_index('ZSCORE', K.ended, call) then",
        "if false then",
    ),
    (
        "a swept call leaves its pod busy",
        "if pod then reassign_and_hand_off(pod, record_call_outcome(pod, cause, time)) end",
        "",
    ),
    ("busy pods move to another pool", "if pod.calls > 0 or pod.is_plain", "if pod.is_plain"),
    ("a pod stays plain when it becomes unready", "'pin', pin, 'plain', '')", "'pin', pin)"),
    (
        "a pod stays plain after a failure",
        "'failures', failures, 'plain', plain_pool(pod))\n    return false",
        "'failures', failures)\n    return false",
    ),
    (
        "the pin of a plain pod is ignored",
        "  if pod.is_plain then\n    local pin",
        "  if false then\n    local pin",
    ),
    (
        "a moved pod stays in the indexes of its old pool",
        "  remove_from_pool(pod)\n  pod.tier = tier",
        "  pod.tier = tier",
    ),
    ("pack works like spread", "kind.strategy == 'pack'", "false"),
    ("removal when idle ends live calls", "mode == 'when_idle' and pod.calls > 0", "false"),
    (
        "a merchant exceeds max_calls by one",
        "outbound.calls_room(merchant, config.max_calls, 1) < 1 then",
        "outbound.calls_room(merchant, config.max_calls + 1, 1) < 1 then",
    ),
    (
        "an ended call counts against its merchant",
        "if merchant ~= '' then run_index('ZREM', live_key(merchant), call) end",
        "",
    ),
    (
        "max_rate admits one call too many",
        "'LINDEX', rate_key(merchant), config.max_rate - 1)",
        "'LINDEX', rate_key(merchant), config.max_rate)",
    ),
    (
        "a refused call counts against max_rate",
        "  local is_limited = document and not request.is_reconnect",
        "  count_admission(request, config)\n  local is_limited = document and not request.is_reconnect",
    ),
    (
        "a late confirmation takes a pod with another call",
        "or not pod or pod.calls >= cap_of(pod) then",
        "or not pod or not is_serving(pod) then",
    ),
    (
        "a confirmed call stays provisional",
        "    run('HSET', K.call .. call, 'stage', '', REQUEST_IDS, '')\n    if pod then",
        "    if pod then",
    ),
    ("a confirmation revives a call that ended normally", "or call_end.cause ~= 'unconfirmed'", ""),
    (
        "the queue is last in, first out",
        "'ZPOPMIN', pool_keys_of(pod.tier).queue",
        "'ZPOPMAX', pool_keys_of(pod.tier).queue",
    ),
    ("priorities are ignored", "local score = -priority * RULES.PRIORITY_STEP +", "local score ="),
    (
        "a handed-off call stays in the queues",
        "  remove_from_queues(call, entry.merchant, entry.pools, except_tier)\n",
        "",
    ),
    (
        "a freed pod is not handed off",
        "  while hand_off_slot(pod) do is_placed, pod.keeps_count = true, nil end\n",
        "",
    ),
    (
        "the lease of an accepted hand-off does not begin",
        "set_deadline(pod, call, now + request.lease, nil, record.merchant_id)\n      run('HSET'",
        "run('HSET'",
    ),
    (
        "a poll does not extend the poll deadline",
        "set_poll_by(call, entry, next_poll_deadline(entry.ends, request.poll_timeout))",
        "false",
    ),
    (
        "the queue exceeds its limit by one",
        "count('ZCARD', K.waiting) < request.max_waiting\n",
        "count('ZCARD', K.waiting) <= request.max_waiting\n",
    ),
    (
        "the queue exceeds the limit of a merchant by one",
        "not (merchant_key and count('ZCARD', merchant_key) >= request.max_waiting_per_merchant)",
        "not (merchant_key and count('ZCARD', merchant_key) > request.max_waiting_per_merchant)",
    ),
    (
        "a handed-off call is not requeued when its pod is removed",
        "  set_queue_entry(call, entry, record.pod_attempt)\n  return entry\n",
        "  return entry\n",
    ),
    ("a call waits past its hold time", "if now >= entry.ends then", "if false then"),
    (
        "the end of the first pod attempt ends the second",
        "or pod_attempt ~= '' and tonumber(pod_attempt) ~= (tonumber(record.pod_attempt) or 0) then",
        "then",
    ),
    (
        "a reconnect gets the same pod",
        "any ~= avoid and usable(any, tier, 1)",
        "usable(any, tier, 1)",
    ),
    (
        "reconnects are unlimited",
        "return max(1, request.previous.pod_attempt) + failovers > request.previous.max_retries",
        "return false",
    ),
    (
        "a release after the end of the stream does not update the history",
        "        update_call_end(call, call_end, cause)\n",
        "",
    ),
    (
        "a whole pool may be in quarantine",
        "3, 3) + 1) * RULES.QUARANTINE_SHARE >",
        "3, 3) + 1) * 1 >",
    ),
    (
        "a success does not end a quarantine",
        "  set_health(pod, 0)\n  return was_quarantined",
        "  return was_quarantined",
    ),
    (
        "a pod keeps the lease of its last call",
        ", K.lease .. pod.name)\n    pod.has_no_lease",
        ")\n    pod.has_no_lease",
    ),
    (
        "a short record keeps fields of the previous one",
        "tried == '' and fields.pod_attempt == '' and not fields.record",
        "tried == '' or stage == ''",
    ),
    (
        "a new call keeps the history of an earlier call of its id",
        "(request.has_history or request.previous)",
        "request.previous",
    ),
    ("the lease names the wrong call", "run('ZREVRANGE'", "run('ZRANGE'"),
    ("refusals are recorded as waits", "record_event('refused',", "record_event('waiting',"),
    ("ends are recorded with the wrong cause", "cause .. ' ' .. text_of(time)", "'agent 0'"),
    ("a new pod is not recorded", "    record_event('joined',", "    local _ = ('joined'):format("),
    (
        "a handed-off call is connected to a pod out of service",
        "local entry = not (pod and is_serving(pod)) and requeue(",
        "local entry = false and requeue(",
    ),
    (
        "a query of waiting calls ignores the merchant",
        "\n      '', entry.merchant\n",
        "\n      '', ''\n",
    ),
    (
        "a replay is allocated a pod",
        "if not request.record and run('EXISTS', key) == 1 then",
        "if false then",
    ),
    (
        "a repeat is refused while its call is live",
        "if not request.record and run('EXISTS', key) == 1 then",
        "if run('EXISTS', key) == 1 then",
    ),
    ("a replay may take another queue entry", "{waiting = true, over", "{over"),
    ("a signature never expires", "run('SET', key, '1', 'PX', window)", "run('SET', key, '1')"),
    (
        "the call history is kept for too long",
        "'PX', RULES.CALL_HISTORY_TTL)",
        "'PX', RULES.CALL_HISTORY_TTL + 20000)",
    ),
    (
        "records of the other schema are not read",
        "    request_ids, pod_attempt = fields_of_other_schema(call)\n  end\n  return {",
        "  end\n  return {",
    ),
    (
        "an allocation writes the pod attempt under the name of the other schema",
        "POD_ATTEMPT, fields.pod_attempt or '')",
        "OTHER_POD_ATTEMPT, fields.pod_attempt or '')",
    ),
    (
        "a queue entry has the pod attempt under the name of the other schema",
        "    POD_ATTEMPT, pod_attempt,",
        "    OTHER_POD_ATTEMPT, pod_attempt,",
    ),
];

pub(crate) fn mutations() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    let calls = MUTATIONS.into_iter().chain(USUAL_CASE_MUTATIONS);
    let calls = calls.chain(STREAM_MUTATIONS).chain(FAILOVER_MUTATIONS);
    calls.chain(CAPACITY_MUTATIONS).chain(SCALING_MUTATIONS).chain(DIAL_MUTATIONS)
}

#[tokio::test]
async fn the_comparison_detects_broken_functions() {
    let selected = std::env::var("MUTATION").unwrap_or_default();
    let mut missed = Vec::new();
    for (description, from, to) in mutations().filter(|(it, ..)| it.contains(&selected)) {
        let functions = || Functions::edited(|code| code.replace(from, to));
        // Redis draws pods at random, so that one run may miss a rare sequence.
        let mut detected = compare_usual_case(functions).await;
        if detected.is_ok() {
            detected = compare_dials(functions).await;
        }
        for seed in 7..10 {
            if detected.is_ok() {
                detected = compare(seed, 40_000, functions, Schema::Two).await;
            }
        }
        match detected {
            Ok(()) => missed.push(description),
            Err(error) => {
                let error = error.lines().next().unwrap_or_default();
                println!("detected: {description}: {error}");
            }
        }
    }
    assert!(missed.is_empty(), "not detected: {missed:#?}");
}
