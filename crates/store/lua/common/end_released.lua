-- end_released: the end of a call that was released, or whose stream was detached.

-- Ends a call and frees its pod. `is_removed` tells that the call is no longer in the pod's index. Returns the reply,
-- as in release.lua.
local function end_released(call, record, cause, is_removed)
  local pod_name = record.pod_name
  local pod = facts_of(pod_name, call, is_removed)
  if record.stage == 'handed' then cause = 'abandoned' end
  end_call(pod, call, record, cause)
  local source = pool_text(record.source_pool, pod and pod.tier)
  local pool, draining, time = source, 0, lasted(record.at)
  if pod then
    pod.released_at = seconds
    reassign_and_hand_off(pod, record_call_outcome(pod, cause, time))
    if pod.released_at then run('HSET', pod.key, 'released_at', seconds) end
    pool = pod.tier and pool_keys_of(pod.tier).source or pool
    draining = is_leaving(pod) and 1 or 0
  end
  if record.stage == 'handed' then return {'waited', now, time} end
  if pool == source and draining == 0 then return {'released', now, pod_name, source, time} end
  return {'released', now, pod_name, source, time, pool, draining}
end
