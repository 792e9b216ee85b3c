-- Removes calls without a record from the index of all calls, and restores calls missing in the index of their pod.
-- ARGV[2..3]: cursor, approximate page size
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

  -- Returns whether a call was repaired.
  local function audit(call, deadline)
    local pod_name = run('HGET', K.call .. call, 'pod_name')
    if not pod_name then
      run('ZREM', K.calls, call)
      return true
    end
    if run('ZSCORE', K.pod_calls .. pod_name, call) then return false end
    local pod = facts_of(pod_name)
    if not pod then return false end
    run('ZADD', K.pod_calls .. pod_name, deadline, call)
    pod.calls = pod.calls + 1
    place(pod)
    return true
  end

  for i = 1, #found, 2 do
    local call, deadline = found[i], found[i + 1]
    seen = seen + 1
    local is_done, is_repaired = pcall(audit, call, deadline)
    if not is_done or is_repaired then repaired[#repaired + 1] = call end
  end
  return {'audited', now, next_cursor, seen, repaired}
end)
