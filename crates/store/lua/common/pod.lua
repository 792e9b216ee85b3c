-- pod: the facts of a pod, and the one function that derives its indexes from them.

-- Reads the tier table's entry for a pool, and with it the end of the re-registration window.
local function read_table(tier)
  tier_entry(tier and (merchant_of(tier) or tier) or '')
end

-- Returns the facts of a pod from which its indexes follow; nil for an unknown pod, nil and the error if they cannot be
-- read. With `ending_call`, reads the tier table as well and removes the call from the indexes; `is_removed` tells that
-- the call is no longer in the pod's index.
local function readable_facts_of(pod_name, ending_call, is_removed)
  local key, calls_key, draining_key = K.pod .. pod_name, K.pod_calls .. pod_name, K.pod_draining .. pod_name
  local tier, fields = try('HGET', key, 'plain'), nil
  local ready, terminating, pin, failures, quarantined_until, at_risk
  if not tier or tier == '' or tier.err then
    fields = try('HMGET', key, 'ready', 'terminating', 'pin', 'failures', 'quarantined_until', 'at_risk')
    ready, terminating, pin, failures, quarantined_until, at_risk = unpack(fields)
    if not ready then return nil, fields.err and key .. ': ' .. fields.err end
    tier = try('GET', K.pod_tier .. pod_name)
    if type(tier) ~= 'string' then tier = nil end
  end
  -- All fields of a plain pod: Lua copies a table that grows beyond the fields of its constructor.
  local pod = {name = pod_name, key = key, calls_key = calls_key, tier = tier, calls = 0, has_lost_call = false,
    has_no_lease = false, is_plain = false, draining = false, released_at = false, keeps_count = false}
  if ending_call then
    read_table(tier)
    local index = K.calls
    run_index('ZREM', index, ending_call)
    local removed = is_removed and 1 or try('ZREM', calls_key, ending_call)
    if removed == 1 then
      pod.has_lost_call = true
    elseif removed ~= 0 then
      -- The next sweep ends the call.
      run('ZADD', index, text_of(now), ending_call)
      return nil, calls_key .. ': ' .. removed.err
    end
  end
  -- Usually neither key exists.
  if run('EXISTS', draining_key, calls_key) > 0 then
    if run('EXISTS', draining_key) == 1 then pod.draining = true end
    local calls = try('ZCARD', calls_key)
    if type(calls) ~= 'number' then return nil, calls_key .. ': ' .. calls.err end
    pod.calls = calls
  end
  if not fields then
    pod.is_plain = true
    return pod
  end
  if ready ~= '1' then pod.unready = true end
  if terminating == '1' then pod.terminating = true end
  if pin and pin ~= '' then pod.pin = pin end
  if failures and failures ~= '0' then pod.failures = tonumber(failures) end
  if quarantined_until and quarantined_until ~= '' then pod.quarantined = true end
  if at_risk == '1' then pod.at_risk = true end
  return pod
end

-- Returns the facts of a pod; fails if they cannot be read. Functions over many pods use readable_facts_of instead, so
-- that one pod does not fail them; the audit reports it.
local function facts_of(pod_name, ending_call, is_removed)
  local pod, err = readable_facts_of(pod_name, ending_call, is_removed)
  if err then error(err, 0) end
  return pod
end

-- Returns the UID, which distinguishes successive pods of one name.
local function uid_of(pod)
  return read('HGET', pod.key, 'uid') or ''
end

-- Returns whether the drain of a pod takes a surplus pod out of service, and no request asked for it.
local function is_surplus(pod_name)
  return try('GET', K.pod_draining .. pod_name) == 'surplus'
end

local function is_leaving(pod)
  return pod.draining or pod.terminating
end

local function is_serving(pod)
  return not (pod.unready or pod.draining or pod.terminating or pod.quarantined)
end

-- Publishes that a drain of the pod may have ended: it has no call left, was removed, or serves again. Without the
-- permission to publish, drain requests notice it by polling.
local function publish_drain(pod_name)
  redis.pcall('PUBLISH', K.drained, pod_name)
end

-- Returns the pool of a pod whose other facts are all defaults: ready, not terminating, not at risk, no failures, not
-- pinned to another pool; else ''. The field `plain` caches it, so that most reads need no other fact.
local function plain_pool(pod)
  local is_pinned_elsewhere = pod.pin and pod.pin ~= pod.tier and 'merchant:' .. pod.pin ~= pod.tier
  local is_plain = pod.is_plain
    or not (pod.unready or pod.terminating or pod.at_risk or pod.quarantined or is_pinned_elsewhere)
  return is_plain and (pod.failures or 0) == 0 and pod.tier or ''
end

-- Derives the entry of a pod at risk in the index of the last choices of its pool.
local function place_at_risk(pod, takes_calls)
  local key = pool_keys_of(pod.tier).at_risk
  if takes_calls then run_index('ZADD', key, text_of(pod.calls), pod.name) else run_index('ZREM', key, pod.name) end
end

-- Derives the indexes that follow from a pod's calls: its availability, its lease, its status. `call` is its only call
-- where the caller knows it, with its deadline, start (s) and source pool. `keeps_count` marks a pod whose number of
-- calls is the same as before, so that its availability is not written; `has_no_lease` one without a lease.
local function place_calls(pod, call, deadline, at, pool)
  local tier, calls = pod.tier, pod.calls
  local serves, kind = is_serving(pod), tier and not pod.keeps_count and kind_of(tier)
  if kind then
    local key = pool_keys_of(tier).available
    if pod.at_risk then
      local takes_calls = serves and (kind.kind == 'shared' or calls == 0)
      place_at_risk(pod, takes_calls)
    elseif kind.kind == 'shared' then
      if serves then run_index('ZADD', key, text_of(calls), pod.name) else run_index('ZREM', key, pod.name) end
    elseif serves and calls == 0 then
      run_index('SADD', key, pod.name)
    else
      run_index('SREM', key, pod.name)
    end
  end
  local status = not serves and is_leaving(pod) and 'draining' or calls > 0 and 'allocated'
    or pod.quarantined and 'quarantined' or 'available'
  if calls == 0 then
    if not serves and is_leaving(pod) then publish_drain(pod.name) end
    if not pod.has_no_lease then run('DEL', K.lease .. pod.name) end
    if pod.released_at then
      run('HSET', pod.key, 'status', status, 'allocated_call_sid', '', 'allocated_at', '', 'released_at',
        pod.released_at)
      pod.released_at = nil
    else
      run('HSET', pod.key, 'status', status, 'allocated_call_sid', '', 'allocated_at', '')
    end
    return
  end
  if not call then
    call, deadline = unpack(run('ZREVRANGE', pod.calls_key, '0', '0', 'WITHSCORES'))
    deadline = tonumber(deadline)
    at, pool = fields_of(call, 'allocated_at', 'source_pool')
    at, pool = at or '', pool or ''
  end
  run('SET', K.lease .. pod.name, call, 'PX', text_of(max(1, deadline - now) + RULES.KEY_SLACK))
  if pod.has_no_lease then pod.has_no_lease = false end
  run('HSET', pod.key, 'status', status, 'allocated_call_sid', call, 'allocated_at', at, 'source_pool', pool)
end

-- Removes a pod from an index of either type.
local function remove_from_index(key, pod_name)
  local kind = run('TYPE', key).ok
  if kind == 'set' then run('SREM', key, pod_name) end
  if kind == 'zset' then run('ZREM', key, pod_name) end
end

-- Derives the indexes that follow from a pod's pool and service state.
local function place_service(pod)
  run('HSET', pod.key, 'plain', plain_pool(pod))
  if not pod.tier then return end
  if pod.at_risk then
    remove_from_index(pool_keys_of(pod.tier).available, pod.name)
  elseif not pod.is_plain then
    run_index('ZREM', pool_keys_of(pod.tier).at_risk, pod.name)
  end
  run_index('SADD', K.pools, pod.tier)
  run_index('SADD', pool_keys_of(pod.tier).assigned, pod.name)
  if is_serving(pod) then
    run_index('ZREM', pool_keys_of(pod.tier).out, pod.name)
  else
    run_index('ZADD', pool_keys_of(pod.tier).out, is_leaving(pod) and 1 or pod.unready and 2 or 3, pod.name)
  end
end

-- Derives all indexes of a pod.
local function place(pod)
  place_service(pod)
  place_calls(pod)
end

-- Removes a pod from all indexes of its pool.
local function remove_from_pool(pod)
  if not pod.tier then return end
  remove_from_index(pool_keys_of(pod.tier).assigned, pod.name)
  remove_from_index(pool_keys_of(pod.tier).out, pod.name)
  remove_from_index(pool_keys_of(pod.tier).available, pod.name)
  remove_from_index(pool_keys_of(pod.tier).at_risk, pod.name)
end

-- Assigns a pod to a pool; place must follow.
local function set_pool(pod, tier)
  run_index('HSET', K.pod_metadata, pod.name, cjson.encode({tier = tier, name = pod.name}))
  remove_from_pool(pod)
  pod.tier = tier
  run('SET', K.pod_tier .. pod.name, tier)
  record_event('moved', '', pod.name, pool_keys_of(tier).source)
end

-- Returns the pool that a pod is pinned to by its label; nil if there is no such pool.
local function pinned(pod)
  if pod.is_plain then
    local pin = run('HGET', pod.key, 'pin')
    pod.is_plain, pod.pin = nil, pin and pin ~= '' and pin or nil
  end
  if not pod.pin or merchant_of(pod.pin) then return pod.pin end
  local entry = tier_entry(pod.pin)
  if not entry then return nil end
  return entry.kind == 'dedicated' and 'merchant:' .. pod.pin or pod.pin
end

-- Returns the pool for a pod without one: a merchant pool below its target, else the first tier of the chain below its
-- target, else the last tier of the chain. Tiers with a workload take the pods of that workload only.
local function default_pool()
  local fields = run('HGETALL', K.tiers)
  local tiers, names, chain, workloads = {}, {}, '', ''
  for i = 1, #fields, 2 do
    local name, text = fields[i], fields[i + 1]
    if name == ':chain' then
      chain = text
    elseif name == ':workloads' then
      workloads = text
    elseif string.sub(name, 1, 1) ~= ':' then
      tiers[name] = parse_entry(text) or nil
      if tiers[name] then names[#names + 1] = name end
    end
  end
  local function is_below(tier, target)
    return count('SCARD', pool_keys_of(tier).assigned) < target
  end
  for name in string.gmatch(workloads, '(%S+)=') do
    -- The pool of a tier of the chain, or of a merchant.
    if tiers[name] then tiers[name] = {kind = '', has_workload = true} end
  end
  table.sort(names)
  for _, name in ipairs(names) do
    if tiers[name].kind == 'dedicated' and is_below('merchant:' .. name, tiers[name].target) then
      return 'merchant:' .. name
    end
  end
  local last
  for name in string.gmatch(chain, '(%S+)=') do
    if tiers[name] and not tiers[name].has_workload then
      if is_below(name, tiers[name].target) then return name end
      last = name
    end
  end
  return last
end

-- Assigns an idle pod to the pool it belongs in. A pod gets its first pool when it first serves; a busy pod keeps its
-- pool. Returns whether the pod moved.
local function assign_pool(pod)
  if pod.calls > 0 or pod.is_plain and is_defined(pod.tier) then return false end
  local pin = pinned(pod)
  if pod.tier and (pin == pod.tier or not pin and is_defined(pod.tier)) then return false end
  if not pod.tier and not is_serving(pod) then return false end
  local tier = pin or default_pool()
  if not tier then return false end
  set_pool(pod, tier)
  return true
end

-- Sets the deadline of a call in all indexes, and the lifetime of its record where `life` is given. Precedes other
-- writes, because it fails on a pod's index of the wrong type.
local function set_deadline(pod, call, deadline, life, merchant)
  deadline = text_of(deadline)
  run_index('ZADD', K.calls, deadline, call)
  if pod then run('ZADD', pod.calls_key, deadline, call) end
  if life then run('PEXPIRE', K.call .. call, life) end
  if merchant and merchant ~= '' then run_index('ZADD', live_key(merchant), deadline, call) end
end

-- Returns the number of calls that a pod with a pool may serve, in service or not.
local function slots_of(pod)
  local kind = kind_of(pod.tier)
  return kind and kind.kind == 'shared' and kind.cap or 1
end

-- Returns the number of calls that a pod may serve; 0 if it is out of service.
local function cap_of(pod)
  local kind = pod.tier and kind_of(pod.tier)
  return kind and is_serving(pod) and (kind.kind == 'shared' and kind.cap or 1) or 0
end

-- Allocates a pod to a call. `fields` has the fields of the record (merchant, request_id, stage, pod_attempt, tried),
-- and `record` if the call has a record already. A call without `tried` is no new one: the store had lost it or ended
-- it early. `life` is the lifetime of the record.
local function allocate_pod(pod, call, fields, deadline, life)
  local key, pool = K.call .. call, pool_keys_of(pod.tier).source
  local pod_name, merchant, tried, stage, number = pod.name, fields.merchant, fields.tried, fields.stage, fields.number
  set_deadline(pod, call, deadline, nil, merchant)
  local at, is_first = text_of(now), tried == '' and fields.pod_attempt == '' and not fields.record
  if is_first and stage == '' then
    run('HSET', key, 'pod_name', pod_name, 'source_pool', pool, 'merchant_id', merchant, 'allocated_at', seconds,
      'at', at, REQUEST_IDS, fields.request_id)
  elseif is_first then
    run('HSET', key, 'pod_name', pod_name, 'source_pool', pool, 'merchant_id', merchant, 'allocated_at', seconds,
      'at', at, REQUEST_IDS, fields.request_id, 'stage', stage)
  else
    run('HSET', key, 'pod_name', pod_name, 'source_pool', pool, 'merchant_id', merchant or '', 'allocated_at', seconds,
      'at', at, REQUEST_IDS, fields.request_id or '', 'tried', tried or '', 'stage', stage or '',
      POD_ATTEMPT, fields.pod_attempt or '')
  end
  run('PEXPIRE', key, life)
  if number and number ~= '' then
    run('HSET', key, 'number', number)
    outbound.take_line(number, 'call:' .. call)
  end
  record_event('allocated', call, pod_name, pool, merchant, tried or 'returned')
  pod.calls = pod.calls + 1
  if pod.calls == 1 then place_calls(pod, call, deadline, seconds, pool) else place_calls(pod) end
  return pool
end

-- Adds the end of a call that may reconnect to the call history.
local function record_call_end(call, pod_name, cause, pod_attempt, lasted_for, merchant, failovers, number)
  if pod_attempt == '' then pod_attempt = '0' end
  if merchant == '' then merchant = '-' end
  local text = table.concat({pod_name, cause, pod_attempt, lasted_for, merchant}, ' ')
  -- Routers of the previous version read entries without these values only: failovers, number of the line.
  if (tonumber(failovers) or 0) > 0 or number ~= '' then text = text .. ' ' .. text_of(tonumber(failovers) or 0) end
  if number ~= '' then text = text .. ' ' .. number end
  run('SET', K.call_end .. call, text, 'PX', RULES.CALL_HISTORY_TTL)
end

-- Returns the end of a call from the call history; nil if it has none.
local function call_end_of(call)
  local text = try('GET', K.call_end .. call)
  if type(text) ~= 'string' then return nil end
  local pod_name, cause, pod_attempt, lasted_for, merchant, failovers, number =
    string.match(text, '^(%S+) (%S+) (%d+) (%d+) (%S+) ?(%d*) ?(%S*)$')
  return pod_name and {pod_name = pod_name, cause = cause, pod_attempt = tonumber(pod_attempt),
    lasted = tonumber(lasted_for), merchant = merchant ~= '-' and merchant or '', failovers = tonumber(failovers) or 0,
    number = number}
end

-- Changes the cause in the call history; the entry expires at the same time as before.
local function update_call_end(call, call_end, cause)
  local left = run('PTTL', K.call_end .. call)
  record_call_end(call, call_end.pod_name, cause, tostring(call_end.pod_attempt), call_end.lasted, call_end.merchant,
    call_end.failovers, call_end.number)
  run('PEXPIRE', K.call_end .. call, max(1, left))
end

-- Causes after which any call may return: its stream may start or attach late.
local MAY_START_LATE = {unconfirmed = true, unattached = true}

-- Ends a call that its pod's indexes no longer contain: its record, its lease. `pod` is nil for an unknown pod.
local function end_call(pod, call, record, cause)
  local pod_name, merchant, pod_attempt, time = record.pod_name, record.merchant_id, record.pod_attempt,
    lasted(record.at)
  if not pod then run_index('ZREM', K.calls, call) end
  if pod and pod.calls == 0 then
    run('DEL', K.call .. call, K.lease .. pod.name)
    pod.has_no_lease = true
  else
    run('DEL', K.call .. call)
  end
  if merchant ~= '' then run_index('ZREM', live_key(merchant), call) end
  outbound.free_line(record.number, 'call:' .. call)
  local attached = record.stream and stream_of(record)
  if attached then run_index('ZREM', K.gateway .. attached.gateway, call) end
  record_event('ended', call, pod_name or '', '', merchant, cause .. ' ' .. text_of(time))
  -- A gateway that was cut off from the store attaches its streams again: an end in the history tells a call that ended
  -- meanwhile from one that the store has lost. The caller never learnt of a hand-off that was taken back.
  if (attached or pod_attempt ~= '' or MAY_START_LATE[cause]) and pod_name
    and record.stage ~= 'handed' and cause ~= 'abandoned' then
    record_call_end(call, pod_name, cause, pod_attempt, time, merchant, record.failovers, record.number)
  end
  if now < trusting_until then
    -- Sweeps trim this index.
    run_index('ZADD', K.ended, text_of(now), call)
  end
end

-- Sets the failure count of a pod and the end of its quarantine (ms), if any.
local function set_health(pod, failures, quarantined_until)
  local was_quarantined = pod.quarantined
  pod.failures, pod.quarantined = failures, quarantined_until and true or nil
  if quarantined_until and not was_quarantined then
    record_event('quarantined', '', pod.name, '', '', text_of(floor(quarantined_until / 1000)))
  elseif was_quarantined and not quarantined_until then
    record_event('restored', '', pod.name, '')
  end
  run('HSET', pod.key, 'failures', failures, 'quarantined_until', quarantined_until or '', 'plain', plain_pool(pod))
  if quarantined_until then
    run_index('ZADD', K.quarantined, quarantined_until, pod.name)
  else
    run_index('ZREM', K.quarantined, pod.name)
  end
end

-- Resets the health of a pod after a success. Returns whether its service state changes.
local function record_success(pod)
  if (pod.failures or 0) == 0 and not pod.quarantined then return false end
  local was_quarantined = pod.quarantined
  set_health(pod, 0)
  return was_quarantined
end

-- Counts a failure: a call that never connected, or an early failure. QUARANTINE_FAILURES in a row quarantine the pod,
-- within the share of its pool that may be in quarantine. Returns whether its service state changes.
local function record_failure(pod)
  local failures, keys = (pod.failures or 0) + 1, pod.tier and pool_keys_of(pod.tier)
  if pod.quarantined or failures < RULES.QUARANTINE_FAILURES or not keys
    or (count('ZCOUNT', keys.out, 3, 3) + 1) * RULES.QUARANTINE_SHARE > count('SCARD', keys.assigned) then
    pod.failures = failures
    run('HSET', pod.key, 'failures', failures, 'plain', plain_pool(pod))
    return false
  end
  set_health(pod, failures, now + RULES.QUARANTINE_TIME)
  return true
end

-- Causes after which the caller does not reconnect.
local is_final = {agent = true, provider = true, operator = true}

-- Causes after which a report of a final cause may still arrive.
local MAY_BE_UPDATED = {stream = true, broken = true, lease = true, unconfirmed = true, unattached = true}

-- Causes that are a failure of the pod, however long the call lasted.
local IS_FAILURE = {unconfirmed = true, unreachable = true, pod_lost = true}

-- Counts the end of a call as a success or failure of its pod. Returns whether the pod's service state changes.
local function record_call_outcome(pod, cause, lasted_for)
  if IS_FAILURE[cause] then return record_failure(pod) end
  if cause == 'agent' or cause == 'provider' and lasted_for >= RULES.EARLY_FAILURE then return record_success(pod) end
  return false
end
