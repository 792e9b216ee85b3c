-- Removes a pod and ends its calls.
-- ARGV[2..6]: origin, epoch, pod, uid, mode (now, when_idle)
-- Replies: {gone, now, {call, source pool, lasted, ...}}   {busy, now}   {not_there, now}: no such pod
--          {fenced, now, epoch}   {foreign, now, origin}
operation('remove_pod', function(ARGV)
  local _, origin, epoch, pod_name, uid, mode = unpack(ARGV)
  local refused = fence(origin, epoch)
  if refused then return refused end
  local pod = facts_of(pod_name)
  if not pod or uid_of(pod) ~= uid then return {'not_there', now} end
  if mode == 'when_idle' and pod.calls > 0 then return {'busy', now} end
  read_table(pod.tier)
  local ended, requeued = end_calls(pod)
  remove_from_pool(pod)
  run('DEL', K.pod .. pod.name, K.pod_tier .. pod.name, K.pod_draining .. pod.name,
    K.lease .. pod.name, pod.calls_key)
  run_index('ZREM', K.draining, pod.name)
  run_index('ZREM', K.quarantined, pod.name)
  run_index('HDEL', K.pod_metadata, pod.name)
  record_event('gone', '', pod.name, '')
  publish_drain(pod.name)
  hand_off_requeued(requeued)
  return {'gone', now, ended}
end)
