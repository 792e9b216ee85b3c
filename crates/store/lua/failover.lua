-- Moves the stream of a call to another pod: its pod cannot be reached, is lost in mid-call, or serves an older stream.
-- The same pod is used again only if no other is free and it is in service. It is a heartbeat of the gateway. A repeat
-- with the same next stream id changes nothing.
-- ARGV[2..11]: call, stream id, next stream id, gateway, lease of the gateway (ms), cause (unreachable, pod_lost,
--   displaced), maximum of pods that a call may lose in mid-call and go on, lease (ms), life of the record (ms), reason
--   of the pod's failure or ''
-- Replies: {attached, …}: as in attach.lua
--          {refused, now, reason}: not_found, ending, and after these the call has ended: spent, no_pods
--          {lost, now}: the store is empty   {late, now}

-- Returns the next pod of a stream and the steps skipped before it; nil if there is none. `pod` is its pod now.
local function choose_next_pod(record, pod)
  local steps = chain_of(record.merchant_id)
  local other, tried = choose_pod(steps, record.pod_name)
  if other then return other, tried end
  -- More than its cap are on the pod while others have to leave it, or after a new table.
  local is_usable = pod and pod.tier and is_serving(pod) and kind_of(pod.tier) and pod.calls <= slots_of(pod)
  return is_usable and pod or nil, ''
end

-- Moves the call to its next pod, which may be the same one. `pod` is nil if the former pod is unknown.
local function move_call(call, record, pod, next_pod, deadline, life)
  if pod and pod.name ~= next_pod.name then
    run('ZREM', pod.calls_key, call)
    pod.calls, pod.has_lost_call = pod.calls - 1, true
    next_pod.calls = next_pod.calls + 1
  elseif not pod then
    next_pod.calls = next_pod.calls + 1
  end
  set_deadline(next_pod, call, deadline, life, record.merchant_id)
  run('HSET', K.call .. call, 'pod_name', next_pod.name, 'source_pool', record.source_pool, 'tried', record.tried,
    'failovers', record.failovers)
  place_calls(next_pod)
end

operation('failover', function(ARGV)
  local _, call, stream, next_stream, gateway, gateway_lease, cause, max_retries, lease, life, reason = unpack(ARGV)
  local record = read_record(call)
  local attached, former = stream_of(record), record.pod_name
  if not attached then return {'refused', now, 'not_found'} end
  if attached.id == next_stream then
    set_gateway(gateway, now + tonumber(gateway_lease), gateway_lease)
    return attached_reply(record, facts_of(former), 0, {})
  end
  if attached.id ~= stream then return {'refused', now, 'not_found'} end
  if attached.ending ~= '' and attached.ending ~= 'displaced' then return {'refused', now, 'ending'} end
  if not has_tiers() then return {'lost', now} end
  local pod = facts_of(former)
  -- A pod that was never reached has not begun a conversation.
  local is_lost = cause ~= 'unreachable'
  local is_last = is_lost and ordinal_of(record) > tonumber(max_retries)
  record_pod_failure(call, record, reason)
  local service_changed = pod and record_call_outcome(pod, cause, lasted(record.at))
  local next_pod, tried
  if not is_last then next_pod, tried = choose_next_pod(record, pod) end
  if not next_pod then
    pod = facts_of(former, call)
    end_call(pod, call, record, cause)
    if pod then reassign_and_hand_off(pod, service_changed) end
    return {'refused', now, is_last and 'spent' or 'no_pods'}
  end
  set_gateway(gateway, now + tonumber(gateway_lease), gateway_lease)
  if attached.gateway ~= gateway then run_index('ZREM', K.gateway .. attached.gateway, call) end
  record.pod_name, record.source_pool, record.tried = next_pod.name, pool_keys_of(next_pod.tier).source, tried
  record.failovers = (tonumber(record.failovers) or 0) + (is_lost and 1 or 0)
  -- The same pod is tried again many times a second.
  if next_pod.name ~= former then
    record_event('failed_over', call, next_pod.name, record.source_pool, record.merchant_id, cause .. ' ' .. former)
  end
  move_call(call, record, pod, next_pod, now + tonumber(lease), life)
  set_stream(call, {gateway = gateway, id = next_stream, since = attached.since, ending = ''})
  if pod and pod.name == next_pod.name then
    if service_changed then place(pod) end
  elseif pod then
    reassign_and_hand_off(pod, service_changed)
  end
  return attached_reply(record, next_pod, 0, {})
end)
