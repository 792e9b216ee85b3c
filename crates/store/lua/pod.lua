-- Returns a pod and its calls.
-- ARGV[2]: pod
-- Replies: {pod, now, {name, tier, uid, address, ready, terminating, at risk, restarts, pin, draining until,
--            quarantined until, {call, at, deadline, ...}}}
--          {unknown, now}
operation('pod', function(ARGV)
  local _, pod_name = unpack(ARGV)
  local row = pod_row(pod_name)
  if not row then return {'unknown', now} end
  return {'pod', now, row}
end)
