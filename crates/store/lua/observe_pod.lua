-- Records the observed state of a pod. Another UID, or a higher restart count of its agent, ends its calls.
-- ARGV[2..11]: origin, epoch, pod, uid, address, ready (1, 0), terminating (1, 0), at risk (1, 0), restarts, pin
-- Replies: {observed, now, joined (1, 0), tier, {call, source pool, lasted, ...}}   {lost, now}: the store is empty
--          {fenced, now, epoch}   {foreign, now, origin}
operation('observe_pod', function(ARGV)
  local _, origin, epoch, pod_name, uid, address, ready, terminating, at_risk, restarts, pin =
    unpack(ARGV)
  local refused = fence(origin, epoch)
  if refused then return refused end
  if not is_set_up() or not has_tiers() then return {'lost', now} end
  local pod = facts_of(pod_name)
  local joined, ended, requeued = pod == nil, {}, {}
  if not pod then
    -- The fields that calls read and write come first: Redis searches a small hash from its start.
    run('HSET', K.pod .. pod_name, 'plain', '', 'status', '', 'allocated_call_sid', '', 'allocated_at', '')
  else
    read_table(pod.tier)
    -- A pod adopted from the older router has no UID yet.
    local known_uid = uid_of(pod)
    local replaced = known_uid ~= '' and known_uid ~= uid
    local known_restarts = tonumber(run('HGET', K.pod .. pod_name, 'restarts') or 0) or 0
    if replaced or known_uid ~= '' and known_restarts < tonumber(restarts) then
      ended, requeued = end_calls(pod)
      record_success(pod)
    end
    -- A pod status without a restart count keeps the known one.
    if not replaced and known_restarts > tonumber(restarts) then restarts = known_restarts end
    if replaced and pod.draining then
      run_index('ZREM', K.draining, pod_name)
      run('DEL', K.pod_draining .. pod_name)
      record_event('undrained', '', pod_name, '')
      publish_drain(pod_name)
      pod.draining = false
    end
    joined = replaced
  end
  if joined then
    record_event('joined', '', pod_name, '', '', address)
  elseif terminating == '1' and not pod.terminating then
    record_event('terminating', '', pod_name, '')
  elseif (ready == '1') == (pod.unready or false) then
    record_event(ready == '1' and 'ready' or 'not_ready', '', pod_name, '')
  end
  run('HSET', K.pod .. pod_name, 'uid', uid, 'address', address, 'ready', ready,
    'terminating', terminating, 'at_risk', at_risk, 'restarts', restarts, 'pin', pin, 'plain', '')
  pod = facts_of(pod_name)
  run_index('HSET', K.pod_metadata, pod_name, cjson.encode({tier = pod.tier or '', name = pod_name}))
  reassign_and_hand_off(pod, true)
  hand_off_requeued(requeued)
  return {'observed', now, joined and 1 or 0, pod.tier or '', ended}
end)
