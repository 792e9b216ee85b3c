-- Ends a drain or a quarantine before its time. A terminating pod stays out.
-- ARGV[2]: pod
-- Replies: {undrained, now, was draining (1, 0), was in quarantine (1, 0), is terminating (1, 0), tier}
--          {unknown, now}
operation('undrain', function(ARGV)
  local _, pod = unpack(ARGV)
  local f = facts_of(pod)
  if not f then return {'unknown', now} end
  local was = f.draining
  if was then
    view('ZREM', K.draining, f.pod)
    run('DEL', K.pod_draining .. f.pod)
    tell('undrained', '', f.pod, '')
    announce_drain(f.pod)
    f.draining = false
  end
  local quarantined = f.quarantined
  fared_well(f)
  resettle(f, true)
  return {'undrained', now, was and 1 or 0, quarantined and 1 or 0, f.terminating and 1 or 0, f.tier or ''}
end)
