-- Attaches the stream of a call to its pod attempt: a gateway relays it. It confirms a provisional call, and is a
-- heartbeat of the gateway. A call that has lost its pod gets one again if the stream proves that it goes on: the same
-- pod or another one if no stream came in time, the connected pod if the gateway was cut off or the store was empty.
-- ARGV[2..9]: call, pod attempt, gateway, lease of the gateway (ms), stream id, lease (ms), life of the record (ms),
--   connection of the stream ('' or: pod, time since the stream was first attached (ms), pods lost in mid-call,
--   merchant or '-')
-- Replies: {attached, now, pod, address, source pool, merchant, is the pod allocated again (1, 0), ordinal of the pod,
--            {calls that leave the pod}}
--          {refused, now, reason}: not_found, other_attempt, already_attached, no_pods, unknown_pod
--          {lost, now}: the store is empty   {late, now}

-- Gives an exclusive pod back to the stream that is connected to it. The calls that were given the pod since then leave
-- it: their gateways fail over, as after a lost pod. A call that has no stream yet gets another pod when it comes.
-- Returns the pod, nil, these calls, and those of them that wait again; nil and the reason if one of them cannot leave.
local function displace(pod, connected)
  if not pod then return nil, 'unknown_pod' end
  if not pod.tier or slots_of(pod) > 1 then return nil, 'no_pods' end
  local since, records, requeued = now - connected.age, {}, {}
  local calls = run('ZRANGE', pod.calls_key, 0, -1)
  table.sort(calls)
  for i, call in ipairs(calls) do
    local record = record_of(call)
    local attached = stream_of(record)
    if attached then
      if attached.ending == '' and tonumber(attached.since) <= since then return nil, 'no_pods' end
    elseif record.stage ~= 'unattached' and record.stage ~= 'handed' then
      return nil, 'no_pods'
    end
    records[i] = record
  end
  for i, call in ipairs(calls) do
    local record = records[i]
    local attached = stream_of(record)
    if attached then
      if attached.ending == '' then order_stream(call, record, attached, 'displaced') end
    elseif record.stage == 'unattached' then
      run_index('ZREM', K.calls, call)
      run('ZREM', pod.calls_key, call)
      pod.calls = pod.calls - 1
      end_call(pod, call, record, 'unattached')
    else
      local entry = requeue(pod, call, record)
      if entry then requeued[#requeued + 1] = {call = call, score = tonumber(entry.score)} end
    end
  end
  return pod, nil, calls, requeued
end

-- Returns the pod for a call that ended, or nil and the reason why it gets none.
local function choose_pod_again(call_end, connected)
  local pod = readable_facts_of(call_end.pod_name)
  if call_end.cause == 'unattached' then
    if pod and pod.calls < cap_of(pod) then return pod end
    local steps = chain_of(call_end.merchant)
    local chosen = steps and choose_pod(steps)
    return chosen, not chosen and 'no_pods'
  end
  -- The gateway was cut off from the store, and has kept the stream.
  local was_cut_off = call_end.cause == 'gateway' or call_end.cause == 'lease'
  if not was_cut_off or not connected or connected.pod_name ~= call_end.pod_name then return nil, 'not_found' end
  if pod and pod.tier and pod.calls < slots_of(pod) then return pod end
  return displace(pod, connected)
end

-- Returns the merchant of a call without a pod, and its pod as displace does, or nil and the reason why it gets none.
local function choose_pod_for_stream(call, pod_attempt, connected)
  local call_end = call_end_of(call)
  if call_end then
    if call_end.pod_attempt ~= tonumber(pod_attempt) then return '', nil, 'other_attempt' end
    return call_end.merchant, choose_pod_again(call_end, connected)
  end
  if not connected then return '', nil, 'not_found' end
  local pod = readable_facts_of(connected.pod_name)
  local obstacle = reregistration_obstacle(pod, call)
  if obstacle == 'ended' then return '', nil, 'not_found' end
  if obstacle then return connected.merchant, displace(pod, connected) end
  return connected.merchant, pod
end

-- Returns the connection of the stream from its argument; nil for none.
local function parse_connected(text)
  local pod_name, age, failovers, merchant = string.match(text or '', '^(%S+) (%d+) (%d+) (%S+)$')
  return pod_name and {pod_name = pod_name, age = tonumber(age), failovers = failovers,
    merchant = merchant ~= '-' and merchant or ''}
end

operation('attach', function(ARGV)
  local _, call, pod_attempt, gateway, gateway_lease, stream, lease, life, connection = unpack(ARGV)
  local deadline, connected = now + tonumber(lease), parse_connected(connection)
  local record = read_record(call)
  local pod_name, attached, is_new = record.pod_name, stream_of(record), not record.pod_name
  local pod, displaced
  if is_new then
    if not has_tiers() then return {'lost', now} end
    local merchant, reason, requeued
    merchant, pod, reason, displaced, requeued = choose_pod_for_stream(call, pod_attempt, connected)
    if not pod then return {'refused', now, reason} end
    local call_end = call_end_of(call)
    leave_queue(call)
    run('DEL', K.call_end .. call)
    record.pod_attempt = pod_attempt ~= '0' and pod_attempt or ''
    local fields = {record = {}, merchant = merchant, pod_attempt = record.pod_attempt,
      number = call_end and call_end.number}
    pod_name, record.merchant_id, record.pod_name = pod.name, merchant, pod.name
    record.source_pool = allocate_pod(pod, call, fields, deadline, life)
    if connected and connected.failovers ~= '0' then
      record.failovers = connected.failovers
      run('HSET', K.call .. call, 'failovers', record.failovers)
    end
    -- Only now: the pod itself must not be handed to them.
    if requeued then hand_off_requeued(requeued) end
  else
    if record.stage == 'handed' then return {'refused', now, 'not_found'} end
    if (tonumber(record.pod_attempt) or 0) ~= tonumber(pod_attempt) then return {'refused', now, 'other_attempt'} end
    if attached and attached.id ~= stream then return {'refused', now, 'already_attached'} end
    pod = facts_of(pod_name)
  end
  set_gateway(gateway, now + tonumber(gateway_lease), gateway_lease)
  if not attached then
    if not is_new then
      set_deadline(pod, call, deadline, life, record.merchant_id)
      if pod then place_calls(pod) end
    end
    local since = text_of(max(0, now - (connected and connected.age or 0)))
    set_stream(call, {gateway = gateway, id = stream, since = since, ending = ''})
    record_event('attached', call, pod_name, '', record.merchant_id, gateway)
  elseif connected then
    -- Its index may have been deleted by hand: each heartbeat would report the call as unknown.
    list_stream(call, attached)
  end
  return attached_reply(record, pod, is_new and 1 or 0, displaced or {})
end)
