-- Removes calls without a record from the index of all calls, and restores calls missing in the index of their pod or
-- of their gateway.
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

  -- Restores the index of an attached call's gateway, and the gateway's lease. Returns whether either was wrong.
  local function audit_stream(call, attached)
    local key, expected = K.gateway .. attached.gateway, attached.ending == '' and '0' or '1'
    local is_wrong = run_index('ZSCORE', key, call) ~= expected
    if is_wrong then run('ZADD', key, expected, call) end
    if run_index('HEXISTS', K.gateways, attached.gateway) == 1 then return is_wrong end
    set_gateway(attached.gateway, now + RULES.GATEWAY_LEASE, RULES.GATEWAY_LEASE)
    return true
  end

  -- Returns whether a call was repaired.
  local function audit(call, deadline)
    local pod_name, stream, number = unpack(run('HMGET', K.call .. call, 'pod_name', 'stream', 'number'))
    if not pod_name then
      run('ZREM', K.calls, call)
      return true
    end
    local attached = stream and stream_of({pod_name = pod_name, stream = stream})
    local is_repaired = attached and audit_stream(call, attached) or false
    is_repaired = number and outbound.take_line(number, 'call:' .. call) or is_repaired
    if run('ZSCORE', K.pod_calls .. pod_name, call) then return is_repaired end
    local pod = facts_of(pod_name)
    if not pod then return is_repaired end
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
