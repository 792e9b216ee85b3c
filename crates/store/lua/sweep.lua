-- Ends the places, leases, drains and quarantines whose deadline has come, oldest first.
-- ARGV[2..3]: limit per kind, longest lease (ms)
-- Replies: {swept, now, {call that waited, how long, ...}, {call, pod, source pool, lasted, cause, ...}, {pods no
--   longer draining}, {pods no longer in quarantine}, is the store set up (1, 0), until when it believes pods: since it
--   was last empty, has a view been replaced that an audit has to fill (1, 0)}

-- Shortens deadlines that a backward clock step has prolonged: leases to the longest lease from
-- now, waiting calls to their time limit. Handles `most` of each, the furthest deadlines first.
-- Returns whether it changed any.
local function bound(most, lease)
  local latest, found = text_of(now + lease), false
  for _, call in ipairs(view('ZRANGEBYSCORE', K.calls, '(' .. latest, '+inf', 'LIMIT', 0, most)) do
    local pod, merchant = fields_of(call, 'pod_name', 'merchant_id')
    local f = pod and readable_facts_of(pod)
    extend(f, call, latest, nil, merchant)
    if f then place_calls(f) end
    found = true
  end
  for _, call in ipairs(view('ZREVRANGE', K.waiting, 0, most - 1)) do
    local place = place_of(call)
    if place and place.waits and wait_from_now(call, place) then
      set_poll_by(call, place, math.min(place.poll_by, place.ends))
      found = true
    end
  end
  return found
end

operation('sweep', function(ARGV)
  local _, most, longest_lease = unpack(ARGV)
  local abandoned, expired, undrained, restored = {}, {}, {}, {}
  if not (is_set_up() and has_tiers()) then return {'swept', now, abandoned, expired, undrained, restored, 0} end
  -- Without a reading of an earlier sweep the clock may have been set back since the first calls.
  local latest = try('GET', K.clock)
  latest = type(latest) == 'string' and tonumber(latest) or math.huge
  if now + 1000 >= latest or not bound(most, longest_lease) then run('SET', K.clock, text_of(now)) end
  entry('')
  local is_flagged = is_waited_for
  for _, call in ipairs(view('ZRANGEBYSCORE', K.waiting, '-inf', now, 'LIMIT', 0, most)) do
    local since = leave(call)
    if since then
      abandoned[#abandoned + 1] = call
      abandoned[#abandoned + 1] = max(0, now - since)
    else
      -- Its record is gone, by hand or by time.
      run('ZREM', K.waiting, call)
      for _, tier in ipairs(view('SMEMBERS', K.pools)) do view('ZREM', names_of(tier).queue, call) end
    end
  end
  local CAUSES = {handed = 'abandoned', provisional = 'unconfirmed'}
  for _, call in ipairs(view('ZRANGEBYSCORE', K.calls, '-inf', now, 'LIMIT', 0, most)) do
    local record = record_of(call)
    local pod, time = record.pod_name, lasted(record.at)
    local f = pod and readable_facts_of(pod, call)
    local cause = CAUSES[record.stage] or 'lease'
    end_call(f or nil, call, record, cause)
    if f then resettle(f, speaks_for(f, cause, time)) end
    if pod then
      for _, value in ipairs({call, pod, pool_text(record.source_pool, f and f.tier), time, cause}) do
        expired[#expired + 1] = value
      end
    end
  end
  local due = try('ZRANGEBYSCORE', K.draining, '-inf', now, 'LIMIT', 0, most)
  if due.err then
    run('DEL', K.draining)
    due = {}
  end
  for _, pod in ipairs(due) do
    local left = run('PTTL', K.pod_draining .. pod)
    if left > RULES.KEY_SLACK + 1000 then
      -- Someone has set the mark anew, by hand and for longer.
      run('ZADD', K.draining, now + left, pod)
    else
      run('ZREM', K.draining, pod)
      run('DEL', K.pod_draining .. pod)
      local f = readable_facts_of(pod)
      if f then
        tell('undrained', '', pod, '')
        announce_drain(pod)
        resettle(f, true)
      end
      undrained[#undrained + 1] = pod
    end
  end
  local over = view('ZRANGEBYSCORE', K.quarantined, '-inf', now, 'LIMIT', 0, most)
  -- A quarantine that would last longer than QUARANTINE_TIME began before the clock was set back.
  if #over == 0 then
    local latest_end = text_of(now + RULES.QUARANTINE_TIME)
    over = view('ZRANGEBYSCORE', K.quarantined, '(' .. latest_end, '+inf', 'LIMIT', 0, most)
  end
  for _, pod in ipairs(over) do
    local f = readable_facts_of(pod)
    if f then
      -- One more bad call, and it is back there.
      set_health(f, f.failures or 0)
      resettle(f, true)
    else
      run('ZREM', K.quarantined, pod)
    end
    restored[#restored + 1] = pod
  end
  -- (for a while longer: no router may have come by when it ended)
  if now < trusting_until + 60000 then
    try('ZREMRANGEBYRANK', K.ended, 0, -RULES.MAX_RECENT_ENDS - 1)
    run('PEXPIRE', K.ended, max(1, trusting_until - now))
  end
  -- Whether releases have to look for calls that wait.
  local waiting = count('ZCARD', K.waiting)
  if waiting == 0 and is_flagged then run('HDEL', K.tiers, ':waiting') end
  if waiting > 0 and not is_flagged then run('HSET', K.tiers, ':waiting', '1') end
  -- A list of pods of the wrong type shows nowhere else.
  view('HLEN', K.pod_metadata)
  return {'swept', now, abandoned, expired, undrained, restored, 1, trusting_until, run('DEL', K.audit_due)}
end)
