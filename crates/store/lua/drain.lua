-- Drains a pod: takes it out of its pool for a time. A mark that lasts longer stays.
-- ARGV[2..3]: pod, time (ms)
-- Replies: {draining, now, live calls, until}   {unknown, now}   {lost, now}: the store is empty
operation('drain', function(ARGV)
  local _, pod_name, time = unpack(ARGV)
  local pod = facts_of(pod_name)
  if not pod then return {has_tiers() and 'unknown' or 'lost', now} end
  local current = try('ZSCORE', K.draining, pod.name)
  current = type(current) == 'string' and tonumber(current) or 0
  local deadline = max(pod.draining and current or 0, now + tonumber(time))
  run_index('ZADD', K.draining, deadline, pod.name)
  run('SET', K.pod_draining .. pod.name, 'true', 'PX', deadline - now + RULES.KEY_SLACK)
  pod.draining = true
  place(pod)
  record_event('drained', '', pod.name, '', '', text_of(floor(deadline / 1000)))
  return {'draining', now, pod.calls, deadline}
end)
