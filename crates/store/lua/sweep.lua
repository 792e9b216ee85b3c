-- Ends the queue entries, reservations, leases of calls and gateways, drains and quarantines whose deadline has passed,
-- oldest first.
-- ARGV[2..3]: limit per kind, longest lease (ms)
-- Replies: {swept, now, {waiting call, time in the queue, ...}, {call, pod, source pool, lasted, cause, ...}, {pods no
--   longer draining}, {pods no longer in quarantine}, {expired reservations}, is the store set up (1, 0), end of the
--   re-registration window, must an audit fill an index that was replaced (1, 0), schema ('' if malformed)}

-- Shortens deadlines that a backward clock step has prolonged: leases to the longest lease from now, waiting calls to
-- their hold time. Handles `limit` of each, the furthest deadlines first. Returns whether it changed any.
local function bound(limit, lease)
  local latest, found = text_of(now + lease), false
  for _, call in ipairs(run_index('ZRANGEBYSCORE', K.calls, '(' .. latest, '+inf', 'LIMIT', 0, limit)) do
    local pod_name, merchant = fields_of(call, 'pod_name', 'merchant_id')
    local pod = pod_name and readable_facts_of(pod_name)
    set_deadline(pod, call, latest, nil, merchant)
    if pod then place_calls(pod) end
    found = true
  end
  for _, call in ipairs(run_index('ZREVRANGE', K.waiting, 0, limit - 1)) do
    local entry = queue_entry_of(call)
    if entry and entry.is_waiting and reset_wait_start(call, entry) then
      set_poll_by(call, entry, math.min(entry.poll_by, entry.ends))
      found = true
    end
  end
  for _, id in ipairs(run_index('ZREVRANGE', K.reservations, 0, limit - 1)) do
    local facts = outbound.get(id)
    if facts and facts.at > now then
      facts.ends, facts.at = facts.ends - (facts.at - now), now
      outbound.set(facts)
      run_index('ZADD', K.reservations, text_of(facts.ends), id)
      run_index('ZADD', dials_key(facts.merchant), text_of(facts.ends), id)
      found = true
    end
  end
  return found
end

-- Ends a call whose lease, or whose gateway's lease, has expired, and adds it to the reply.
local function expire_call(call, record, cause, expired)
  local pod_name, time = record.pod_name, lasted(record.at)
  local pod = pod_name and readable_facts_of(pod_name, call)
  end_call(pod or nil, call, record, cause)
  if pod then reassign_and_hand_off(pod, record_call_outcome(pod, cause, time)) end
  if not pod_name then return end
  for _, value in ipairs({call, pod_name, pool_text(record.source_pool, pod and pod.tier), time, cause}) do
    expired[#expired + 1] = value
  end
end

-- Returns the gateways whose lease has expired, oldest first. After a time without sweeps in which a lease could end,
-- the gateway first gets a full lease: it could not send heartbeats either. A lease that a backward clock step has
-- prolonged is shortened.
local function expired_gateways(unswept)
  local entries, due = run_index('HGETALL', K.gateways), {}
  for i = 1, #entries, 2 do
    local gateway = entries[i]
    local before, lease = lease_of(entries[i + 1])
    lease = lease or RULES.GATEWAY_LEASE
    local longest = now + lease
    -- Heartbeats are at most a third of the lease apart.
    local has_gap = unswept > math.min(RULES.SWEEP_GAP, lease * 2 / 3)
    local ends = (has_gap or not before) and longest or math.min(before, longest)
    if ends ~= before then set_gateway(gateway, ends, lease) end
    if ends <= now then due[#due + 1] = {id = gateway, ends = ends} end
  end
  table.sort(due, function(a, b) return a.ends < b.ends or a.ends == b.ends and a.id < b.id end)
  return due
end

-- Ends calls of expired gateways, at most `limit`, and removes the gateways without calls.
local function sweep_gateways(limit, unswept, expired)
  for _, gateway in ipairs(expired_gateways(unswept)) do
    local key = K.gateway .. gateway.id
    local calls = limit > 0 and run_index('ZRANGE', key, 0, limit - 1) or {}
    limit = limit - #calls
    for _, call in ipairs(calls) do
      local record = record_of(call)
      local attached = stream_of(record)
      if attached and attached.gateway == gateway.id then
        expire_call(call, record, end_cause_of(attached, 'gateway'), expired)
      else
        -- Another gateway has the call, or its record was deleted.
        run('ZREM', key, call)
      end
    end
    if count('ZCARD', key) == 0 then run('HDEL', K.gateways, gateway.id) end
  end
end

-- Ends expired reservations, and updates the flag that tells allocations whether slots are held.
local function sweep_reservations(limit, reservations)
  for _, id in ipairs(run_index('ZRANGEBYSCORE', K.reservations, '-inf', now, 'LIMIT', 0, limit)) do
    local facts = outbound.get(id)
    if facts then
      outbound.end_reservation(facts, 'expired')
      reservations[#reservations + 1] = id
    else
      -- The record was deleted by hand or has expired; the audit corrects the sums.
      run('ZREM', K.reservations, id)
      run('SET', K.audit_due, '1', 'PX', '60000')
    end
  end
  local outstanding = count('ZCARD', K.reservations)
  if outstanding == 0 and has_dials then run('HDEL', K.tiers, ':dials') end
  if outstanding > 0 and not has_dials then run('HSET', K.tiers, ':dials', '1') end
end

operation('sweep', function(ARGV)
  local _, limit, longest_lease = unpack(ARGV)
  local abandoned, expired, undrained, restored, reservations = {}, {}, {}, {}, {}
  local schema = try('GET', K.schema)
  if not (schema and has_tiers()) then
    return {'swept', now, abandoned, expired, undrained, restored, reservations, 0}
  end
  -- Without the time of an earlier sweep the clock may have been set back since the first calls.
  local latest = try('GET', K.clock)
  latest = type(latest) == 'string' and tonumber(latest) or math.huge
  local unswept = latest == math.huge and math.huge or now - latest
  if now + 1000 >= latest or not bound(limit, longest_lease) then run('SET', K.clock, text_of(now)) end
  tier_entry('')
  local is_flagged = has_waiting_calls
  for _, call in ipairs(run_index('ZRANGEBYSCORE', K.waiting, '-inf', now, 'LIMIT', 0, limit)) do
    local since = leave_queue(call)
    if since then
      abandoned[#abandoned + 1] = call
      abandoned[#abandoned + 1] = max(0, now - since)
    else
      -- The record was deleted by hand or has expired.
      run('ZREM', K.waiting, call)
      for _, tier in ipairs(run_index('SMEMBERS', K.pools)) do run_index('ZREM', pool_keys_of(tier).queue, call) end
    end
  end
  for _, call in ipairs(run_index('ZRANGEBYSCORE', K.calls, '-inf', now, 'LIMIT', 0, limit)) do
    local record = record_of(call)
    local attached, cause = stream_of(record), PROVISIONAL[record.stage] or 'lease'
    if record.stage == 'handed' then cause = 'abandoned' end
    -- The call may have been released, and its gateway did not detach the stream.
    if attached then cause = end_cause_of(attached, cause) end
    expire_call(call, record, cause, expired)
  end
  sweep_gateways(tonumber(limit), unswept, expired)
  -- After the leases: an overdue waiting call that gets a slot here ends with the next sweep.
  sweep_reservations(limit, reservations)
  local due = try('ZRANGEBYSCORE', K.draining, '-inf', now, 'LIMIT', 0, limit)
  if due.err then
    run('DEL', K.draining)
    due = {}
  end
  for _, pod_name in ipairs(due) do
    local left = run('PTTL', K.pod_draining .. pod_name)
    if left > RULES.KEY_SLACK + 1000 then
      -- The mark was set by hand to last longer.
      run('ZADD', K.draining, now + left, pod_name)
    else
      run('ZREM', K.draining, pod_name)
      run('DEL', K.pod_draining .. pod_name)
      local pod = readable_facts_of(pod_name)
      if pod then
        record_event('undrained', '', pod_name, '')
        publish_drain(pod_name)
        reassign_and_hand_off(pod, true)
      end
      undrained[#undrained + 1] = pod_name
    end
  end
  local over = run_index('ZRANGEBYSCORE', K.quarantined, '-inf', now, 'LIMIT', 0, limit)
  -- A quarantine that would last longer than QUARANTINE_TIME began before the clock was set back.
  if #over == 0 then
    local latest_end = text_of(now + RULES.QUARANTINE_TIME)
    over = run_index('ZRANGEBYSCORE', K.quarantined, '(' .. latest_end, '+inf', 'LIMIT', 0, limit)
  end
  for _, pod_name in ipairs(over) do
    local pod = readable_facts_of(pod_name)
    if pod then
      -- The failures stay: the next failure quarantines the pod again.
      set_health(pod, pod.failures or 0)
      reassign_and_hand_off(pod, true)
    else
      run('ZREM', K.quarantined, pod_name)
    end
    restored[#restored + 1] = pod_name
  end
  -- One minute longer than the window: no router may have swept when it ended.
  if now < trusting_until + 60000 then
    try('ZREMRANGEBYRANK', K.ended, 0, -RULES.MAX_RECENT_ENDS - 1)
    run('PEXPIRE', K.ended, max(1, trusting_until - now))
  end
  -- The flag tells releases whether to look for waiting calls.
  local waiting = count('ZCARD', K.waiting)
  if waiting == 0 and is_flagged then run('HDEL', K.tiers, ':waiting') end
  if waiting > 0 and not is_flagged then run('HSET', K.tiers, ':waiting', '1') end
  -- No other function replaces a list of pods of the wrong type.
  run_index('HLEN', K.pod_metadata)
  return {'swept', now, abandoned, expired, undrained, restored, reservations, 1, trusting_until,
    run('DEL', K.audit_due), type(schema) == 'string' and schema or ''}
end)
