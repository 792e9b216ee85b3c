-- Attaches the stream of a call to its pod attempt: a gateway relays it. It confirms a provisional call, and is a
-- heartbeat of the gateway. A call that has lost its pod gets one again if the stream proves that it goes on: the same
-- pod or another one if no stream came in time, the connected pod if the gateway was cut off or the store was empty.
-- ARGV[2..9]: call, pod attempt, gateway, lease of the gateway (ms), stream id, lease (ms), life of the record (ms),
--   pod that the stream is connected to ('' for none)
-- Replies: {attached, now, pod, address, source pool, merchant, is the pod allocated again (1, 0)}
--          {refused, now, reason}: not_found, other_attempt, already_attached, no_pods
--          {lost, now}: the store is empty   {late, now}

-- Returns the pod for a call that ended, or the reason why it gets none.
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
  if not was_cut_off or connected ~= call_end.pod_name then return nil, 'not_found' end
  if pod and pod.tier and pod.calls < slots_of(pod) then return pod end
  return nil, 'no_pods'
end

-- Returns the pod for a call without a pod and its merchant, or nil, nil and the reason why it gets none.
local function choose_pod_for_stream(call, pod_attempt, connected)
  local call_end = call_end_of(call)
  if call_end then
    if call_end.pod_attempt ~= tonumber(pod_attempt) then return nil, nil, 'other_attempt' end
    local pod, reason = choose_pod_again(call_end, connected)
    return pod, call_end.merchant, reason
  end
  if connected == '' then return nil, nil, 'not_found' end
  local pod = readable_facts_of(connected)
  local obstacle = reregistration_obstacle(pod, call)
  if obstacle then return nil, nil, obstacle == 'ended' and 'not_found' or 'no_pods' end
  return pod, ''
end

operation('attach', function(ARGV)
  local _, call, pod_attempt, gateway, gateway_lease, stream, lease, life, connected = unpack(ARGV)
  local deadline = now + tonumber(lease)
  local record = read_record(call)
  local pod_name, attached, is_new = record.pod_name, stream_of(record), not record.pod_name
  local pod
  if is_new then
    if not has_tiers() then return {'lost', now} end
    local merchant, reason
    pod, merchant, reason = choose_pod_for_stream(call, pod_attempt, connected or '')
    if not pod then return {'refused', now, reason} end
    leave_queue(call)
    run('DEL', K.call_end .. call)
    local fields = {record = {}, merchant = merchant, pod_attempt = pod_attempt ~= '0' and pod_attempt or ''}
    pod_name, record.merchant_id = pod.name, merchant
    record.source_pool = allocate_pod(pod, call, fields, deadline, life)
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
    set_stream(call, {gateway = gateway, id = stream, since = text_of(now), ending = ''})
    record_event('attached', call, pod_name, '', record.merchant_id, gateway)
  end
  local address = pod and read('HGET', pod.key, 'address') or ''
  return {'attached', now, pod_name, address, pool_text(record.source_pool, pod and pod.tier), record.merchant_id,
    is_new and 1 or 0}
end)
