-- Takes calls without a record out of the index of all calls, and gives pods back
-- the calls that their own index has lost.
-- ARGV[2..3]: cursor, about how many calls
-- Replies: {audited, now, next cursor, calls seen, {calls repaired}}   {lost, now}: the store is not set up
operation('audit_calls', function(ARGV)
  if not is_set_up() then return {'lost', now} end
  local _, cursor, size = unpack(ARGV)
  local scanned = try('ZSCAN', K.calls, cursor, 'COUNT', size)
  if scanned.err then
    -- The audit of the pods fills the index again.
    run('DEL', K.calls)
    return {'audited', now, '0', 0, {K.calls}}
  end
  local next_cursor, found = unpack(scanned)
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

  for i = 1, #found, 2 do
    local call, deadline = found[i], found[i + 1]
    seen = seen + 1
    local done, wrong = pcall(audit, call, deadline)
    if not done or wrong then repaired[#repaired + 1] = call end
  end
  return {'audited', now, next_cursor, seen, repaired}
end)
