-- Takes a pod out of its pool for a while. A mark that lasts longer stays.
-- ARGV[2..3]: pod, how long (ms)
-- Replies: {draining, now, live calls, until}   {unknown, now}   {lost, now}: the store is empty
operation('drain', function(ARGV)
  local _, pod, time = unpack(ARGV)
  local f = facts_of(pod)
  if not f then return {has_tiers() and 'unknown' or 'lost', now} end
  local before = try('ZSCORE', K.draining, f.pod)
  before = type(before) == 'string' and tonumber(before) or 0
  local deadline = max(f.draining and before or 0, now + tonumber(time))
  view('ZADD', K.draining, deadline, f.pod)
  run('SET', K.pod_draining .. f.pod, 'true', 'PX', deadline - now + RULES.KEY_SLACK)
  f.draining = true
  place(f)
  tell('drained', '', f.pod, '', '', text_of(floor(deadline / 1000)))
  return {'draining', now, f.calls, deadline}
end)
