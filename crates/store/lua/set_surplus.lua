-- Takes a surplus pod out of service for a time, or returns it. A drain that a request asked for stays.
-- ARGV[2..6]: origin, epoch, pod, uid, time (ms; '' to return the pod)
-- Replies: {drained, now, live calls}   {returned, now}
--          {not_ours, now}: a request drained the pod, or it is not drained   {not_there, now}: no such pod
--          {fenced, now, epoch}   {foreign, now, origin}
operation('set_surplus', function(ARGV)
  local _, origin, epoch, pod_name, uid, time = unpack(ARGV)
  local refused = fence(origin, epoch)
  if refused then return refused end
  local pod = facts_of(pod_name)
  if not pod or uid_of(pod) ~= uid then return {'not_there', now} end
  local was_surplus = pod.draining and is_surplus(pod_name)
  if pod.draining and not was_surplus or time == '' and not was_surplus then return {'not_ours', now} end
  read_table(pod.tier)
  if time == '' then
    run_index('ZREM', K.draining, pod_name)
    run('DEL', K.pod_draining .. pod_name)
    record_event('undrained', '', pod_name, '')
    publish_drain(pod_name)
    pod.draining = false
    reassign_and_hand_off(pod, true)
    return {'returned', now}
  end
  local current = was_surplus and try('ZSCORE', K.draining, pod_name)
  current = type(current) == 'string' and tonumber(current) or 0
  local deadline = max(current, now + tonumber(time))
  run_index('ZADD', K.draining, deadline, pod_name)
  run('SET', K.pod_draining .. pod_name, 'surplus', 'PX', text_of(deadline - now + RULES.KEY_SLACK))
  if not was_surplus then
    pod.draining = true
    place(pod)
    record_event('drained', '', pod_name, '', '', text_of(floor(deadline / 1000)) .. ' surplus')
  end
  return {'drained', now, pod.calls}
end)
