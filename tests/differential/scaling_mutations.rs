//! Broken builds of workloads and surplus pods: description, text of the library, replacement. All
//! descriptions begin with `scaling`.

pub(crate) const SCALING_MUTATIONS: [(&str, &str, &str); 9] = [
    (
        "scaling: calls prefer the highest ordinal",
        "return ordinal_in(a) < ordinal_in(b)",
        "return ordinal_in(a) > ordinal_in(b)",
    ),
    (
        "scaling: merchant pools are not ordered",
        "  for name in string.gmatch(chain, '~(%S+)') do",
        "  for name in string.gmatch('', '~(%S+)') do",
    ),
    (
        "scaling: a tier with a workload takes other pods",
        "    if tiers[name] and not tiers[name].has_workload then",
        "    if tiers[name] then\n      tiers[name].target = tiers[name].target or 0",
    ),
    (
        "scaling: a merchant tier with a workload takes other pods",
        "if tiers[name] then tiers[name] = {kind = '', has_workload = true} end",
        "if tiers[name] then tiers[name].has_workload = true end",
    ),
    (
        "scaling: a requested drain becomes one of the scaler",
        "if pod.draining and not was_surplus or time == '' and not was_surplus then",
        "if time == '' and not was_surplus then",
    ),
    (
        "scaling: a requested drain is ended",
        "if pod.draining and not was_surplus or time == '' and not was_surplus then",
        "if pod.draining and time ~= '' and not was_surplus then",
    ),
    (
        "scaling: a surplus pod stays in service",
        "    pod.draining = true\n    place(pod)\n    record_event('drained', '', pod_name, '', '', text_of(floor(deadline / 1000)) .. ' surplus')",
        "    record_event('drained', '', pod_name, '', '', text_of(floor(deadline / 1000)) .. ' surplus')",
    ),
    (
        "scaling: a returned pod is not handed off",
        "    pod.draining = false\n    reassign_and_hand_off(pod, true)\n    return {'returned', now}",
        "    pod.draining = false\n    place(pod)\n    return {'returned', now}",
    ),
    (
        "scaling: an older leader returns pods",
        "  if refused then return refused end\n  local pod = facts_of(pod_name)\n  if not pod or uid_of(pod) ~= uid then return {'not_there', now} end\n  local was_surplus",
        "  local pod = facts_of(pod_name)\n  if not pod or uid_of(pod) ~= uid then return {'not_there', now} end\n  local was_surplus",
    ),
];
