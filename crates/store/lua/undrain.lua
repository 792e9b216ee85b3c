-- Ends a drain or a quarantine before its time. A terminating pod stays out of service.
-- ARGV[2]: pod
-- Replies: {undrained, now, was draining (1, 0), was in quarantine (1, 0), is terminating (1, 0), tier}
--          {unknown, now}
operation('undrain', function(ARGV)
  local _, pod_name = unpack(ARGV)
  local pod = facts_of(pod_name)
  if not pod then return {'unknown', now} end
  local was_draining = pod.draining
  if was_draining then
    run_index('ZREM', K.draining, pod.name)
    run('DEL', K.pod_draining .. pod.name)
    record_event('undrained', '', pod.name, '')
    publish_drain(pod.name)
    pod.draining = false
  end
  local was_quarantined = pod.quarantined
  record_success(pod)
  reassign_and_hand_off(pod, true)
  return {'undrained', now, was_draining and 1 or 0, was_quarantined and 1 or 0, pod.terminating and 1 or 0,
    pod.tier or ''}
end)
