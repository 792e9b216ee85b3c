-- A pod and what it does.
-- ARGV[2]: pod
-- Replies: {pod, now, {name, tier, uid, address, ready, terminating, restarts, pin, draining until, in quarantine
--            until, {call, at, deadline, ...}}}
--          {unknown, now}
operation('pod', function(ARGV)
  local _, pod = unpack(ARGV)
  local row = pod_row(pod)
  if not row then return {'unknown', now} end
  return {'pod', now, row}
end)
