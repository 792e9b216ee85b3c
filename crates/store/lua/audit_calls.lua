-- Takes calls without a record out of the index of all calls, and gives pods back
-- the calls that their own index has lost.
-- ARGV[2..3]: cursor, about how many calls
-- Replies: {audited, now, next cursor, calls seen, {calls repaired}}   {lost, now}: the store is not set up
operation('audit_calls', function(ARGV)
  if not is_set_up() then return {'lost', now} end
  local scanned = try('ZSCAN', K.calls, ARGV[2], 'COUNT', ARGV[3])
  if scanned.err then
    -- The audit of the pods fills the index again.
    run('DEL', K.calls)
    return {'audited', now, '0', 0, {K.calls}}
  end
  local repaired, seen = {}, 0

  -- Whether a call had to be put right.
  local function audit(call, deadline)
    local pod = run('HGET', K.call .. call, 'pod_name')
    if not pod then
      run('ZREM', K.calls, call)
      return true
    end
    if run('ZSCORE', K.pod_calls .. pod, call) then return false end
    local f = facts_of(pod)
    if not f then return false end
    run('ZADD', K.pod_calls .. pod, deadline, call)
    f.calls = f.calls + 1
    place(f)
    return true
  end

  for i = 1, #scanned[2], 2 do
    seen = seen + 1
    local done, wrong = pcall(audit, scanned[2][i], scanned[2][i + 1])
    if not done or wrong then repaired[#repaired + 1] = scanned[2][i] end
  end
  return {'audited', now, scanned[1], seen, repaired}
end)
