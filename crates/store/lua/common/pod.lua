-- pod: the facts of a pod, and the one place that derives its views from them.

-- Reads the table's entry for a pod's pool, and with it until when we trust.
local function read_table(tier)
  entry(tier and (merchant_of(tier) or tier) or '')
end

-- The facts that views follow from; nil if the pod is not known, or with what is wrong,
-- if they can't be read. With `leaver`, a call, the table is read as well and the call
-- taken out of the indexes.
local function readable_facts_of(pod, leaver)
  local key, calls_key, draining_key = K.pod .. pod, K.pod_calls .. pod, K.pod_draining .. pod
  local tier, fields = try('HGET', key, 'plain'), nil
  local ready, terminating, pin, failures, quarantined_until
  if not tier or tier == '' or tier.err then
    fields = try('HMGET', key, 'ready', 'terminating', 'pin', 'failures', 'quarantined_until')
    ready, terminating, pin, failures, quarantined_until = unpack(fields)
    if not ready then return nil, fields.err and key .. ': ' .. fields.err end
    tier = try('GET', K.pod_tier .. pod)
    if type(tier) ~= 'string' then tier = nil end
  end
  local f = {pod = pod, key = key, calls_key = calls_key, tier = tier, calls = 0, left = false, unleased = false}
  if leaver then
    read_table(tier)
    local index = K.calls
    view('ZREM', index, leaver)
    local left = try('ZREM', calls_key, leaver)
    if left == 1 then
      f.left = true
    elseif left ~= 0 then
      -- The next sweep ends it.
      run('ZADD', index, text_of(now), leaver)
      return nil, calls_key .. ': ' .. left.err
    end
  end
  -- Mostly there is neither.
  if run('EXISTS', draining_key, calls_key) > 0 then
    if run('EXISTS', draining_key) == 1 then f.draining = true end
    local calls = try('ZCARD', calls_key)
    if type(calls) ~= 'number' then return nil, calls_key .. ': ' .. calls.err end
    f.calls = calls
  end
  if not fields then
    f.is_plain = true
    return f
  end
  if ready ~= '1' then f.unready = true end
  if terminating == '1' then f.terminating = true end
  if pin and pin ~= '' then f.pin = pin end
  if failures and failures ~= '0' then f.failures = tonumber(failures) end
  if quarantined_until and quarantined_until ~= '' then f.quarantined = true end
  return f
end

-- The same, where all fails that can't read them. (Scripts that see many pods must not
-- fail for one; the audit reports it.)
local function facts_of(pod, leaver)
  local f, wrong = readable_facts_of(pod, leaver)
  if wrong then error(wrong, 0) end
  return f
end

-- Which pod of its name it is.
local function uid_of(f)
  return read('HGET', f.key, 'uid') or ''
end

local function leaving(f)
  return f.draining or f.terminating
end

-- Announces that a drain of the pod may have ended: it has no call left, is gone, or serves
-- again. Without the permission to publish, waiting drains notice later.
local function announce_drain(pod)
  redis.pcall('PUBLISH', K.drained, pod)
end

local function serving(f)
  return not (f.unready or f.draining or f.terminating or f.quarantined)
end

-- The pool of a pod of which there is nothing more to know: ready, not terminating, no
-- failures, where it is pinned or not pinned; else ''. A view that saves reading all that.
local function plain(f)
  local is_elsewhere = f.pin and f.pin ~= f.tier and 'merchant:' .. f.pin ~= f.tier
  local is_plain = f.is_plain or not (f.unready or f.terminating or f.quarantined or is_elsewhere)
  return is_plain and (f.failures or 0) == 0 and f.tier or ''
end

-- The views that follow from a pod's calls: its place among the available, its
-- lease, its status. `call` is its one call, where the script knows it, with its
-- deadline, when it began (s) and its source pool. A pod that `stands` has as many
-- calls as before, and keeps its place; one that is `unleased` has no lease.
local function place_calls(f, call, deadline, at, pool)
  local fit, kind = serving(f), f.tier and not f.stands and kind_of(f.tier)
  if kind then
    local key = names_of(f.tier).available
    if kind.kind == 'shared' then
      if fit then view('ZADD', key, text_of(f.calls), f.pod) else view('ZREM', key, f.pod) end
    elseif fit and f.calls == 0 then
      view('SADD', key, f.pod)
    else
      view('SREM', key, f.pod)
    end
  end
  local status = not fit and leaving(f) and 'draining' or f.calls > 0 and 'allocated'
    or f.quarantined and 'quarantined' or 'available'
  if f.calls == 0 then
    if leaving(f) then announce_drain(f.pod) end
    if not f.unleased then run('DEL', K.lease .. f.pod) end
    if f.released_at then
      run('HSET', f.key, 'status', status, 'allocated_call_sid', '', 'allocated_at', '', 'released_at', f.released_at)
      f.released_at = nil
    else
      run('HSET', f.key, 'status', status, 'allocated_call_sid', '', 'allocated_at', '')
    end
    return
  end
  if not call then
    call, deadline = unpack(run('ZREVRANGE', f.calls_key, '0', '0', 'WITHSCORES'))
    deadline = tonumber(deadline)
    at, pool = fields_of(call, 'allocated_at', 'source_pool')
    at, pool = at or '', pool or ''
  end
  run('SET', K.lease .. f.pod, call, 'PX', text_of(max(1, deadline - now) + RULES.KEY_SLACK))
  if f.unleased then f.unleased = false end
  run('HSET', f.key, 'status', status, 'allocated_call_sid', call, 'allocated_at', at, 'source_pool', pool)
end

-- The views that follow from a pod's pool and service.
local function place_service(f)
  run('HSET', f.key, 'plain', plain(f))
  if not f.tier then return end
  view('SADD', K.pools, f.tier)
  view('SADD', names_of(f.tier).assigned, f.pod)
  if serving(f) then
    view('ZREM', names_of(f.tier).out, f.pod)
  else
    view('ZADD', names_of(f.tier).out, leaving(f) and 1 or f.unready and 2 or 3, f.pod)
  end
end

-- All views of a pod.
local function place(f)
  place_service(f)
  place_calls(f)
end

-- Takes a pod out of a view, whatever type the view has.
local function drop(key, pod)
  local kind = run('TYPE', key).ok
  if kind == 'set' then run('SREM', key, pod) end
  if kind == 'zset' then run('ZREM', key, pod) end
end

-- Takes a pod out of all views of its pool.
local function unplace(f)
  if not f.tier then return end
  drop(names_of(f.tier).assigned, f.pod)
  drop(names_of(f.tier).out, f.pod)
  drop(names_of(f.tier).available, f.pod)
end

-- Gives a pod a pool; place must follow.
local function set_home(f, tier)
  view('HSET', K.pod_metadata, f.pod, cjson.encode({tier = tier, name = f.pod}))
  unplace(f)
  f.tier = tier
  run('SET', K.pod_tier .. f.pod, tier)
  tell('moved', '', f.pod, names_of(tier).source)
end

-- The pool a pod's label asks for, if there is such a pool.
local function pinned(f)
  if f.is_plain then
    local pin = run('HGET', f.key, 'pin')
    f.is_plain, f.pin = nil, pin and pin ~= '' and pin or nil
  end
  if not f.pin or merchant_of(f.pin) then return f.pin end
  local found = entry(f.pin)
  if not found then return nil end
  return found.kind == 'dedicated' and 'merchant:' .. f.pin or f.pin
end

-- The pool for a pod that has none: a merchant pool below its target, else the
-- first tier of the chain below its target, else the last of the chain.
local function home()
  local fields = run('HGETALL', K.tiers)
  local tiers, names, chain = {}, {}, ''
  for i = 1, #fields, 2 do
    local name, text = fields[i], fields[i + 1]
    if name == ':chain' then
      chain = text
    elseif string.sub(name, 1, 1) ~= ':' then
      tiers[name] = parse_entry(text) or nil
      if tiers[name] then names[#names + 1] = name end
    end
  end
  local function below(tier, target)
    return count('SCARD', names_of(tier).assigned) < target
  end
  table.sort(names)
  for _, name in ipairs(names) do
    if tiers[name].kind == 'dedicated' and below('merchant:' .. name, tiers[name].target) then
      return 'merchant:' .. name
    end
  end
  local last
  for name in string.gmatch(chain, '(%S+)=') do
    if tiers[name] then
      if below(name, tiers[name].target) then return name end
      last = name
    end
  end
  return last
end

-- Gives an idle pod the pool it should be in. A pod gets its first pool when it
-- is first in service; a busy one keeps what it has. Answers whether it moved.
local function settle(f)
  if f.calls > 0 or f.is_plain and wanted(f.tier) then return false end
  local pin = pinned(f)
  if f.tier and (pin == f.tier or not pin and wanted(f.tier)) then return false end
  if not f.tier and not serving(f) then return false end
  local tier = pin or home()
  if not tier then return false end
  set_home(f, tier)
  return true
end

-- Sets the deadline of a call in all indexes, and how long its record lives, if
-- there is one already. Comes before other writes: a pod's index of the wrong type shows
-- here.
local function extend(f, call, deadline, life, merchant)
  deadline = text_of(deadline)
  view('ZADD', K.calls, deadline, call)
  if f then run('ZADD', f.calls_key, deadline, call) end
  if life then run('PEXPIRE', K.call .. call, life) end
  if merchant and merchant ~= '' then view('ZADD', live_key(merchant), deadline, call) end
end

-- How many calls a pod may carry; 0 if none.
local function cap_of(f)
  local kind = f.tier and kind_of(f.tier)
  return kind and serving(f) and (kind.kind == 'shared' and kind.cap or 1) or 0
end

-- Gives a call a pod. `c` is its record: merchant, attempt, stage, attempts, tried, and
-- what was there before, if anything was. `life` is how long it lives.
local function give(f, call, c, deadline, life)
  local key, pool = K.call .. call, names_of(f.tier).source
  extend(f, call, deadline, nil, c.merchant)
  if not c.record and c.tried == '' and c.stage == '' and c.attempts == '' then
    run('HSET', key, 'pod_name', f.pod, 'source_pool', pool, 'merchant_id', c.merchant, 'allocated_at', seconds,
      'at', text_of(now), 'attempt', c.attempt)
  else
    run('HSET', key, 'pod_name', f.pod, 'source_pool', pool, 'merchant_id', c.merchant or '', 'allocated_at', seconds,
      'at', text_of(now), 'attempt', c.attempt or '', 'tried', c.tried or '', 'stage', c.stage or '',
      'attempts', c.attempts or '')
  end
  run('PEXPIRE', key, life)
  tell('allocated', call, f.pod, pool, c.merchant, c.tried)
  f.calls = f.calls + 1
  if f.calls == 1 then place_calls(f, call, deadline, seconds, pool) else place_calls(f) end
  return pool
end

-- Remembers how a call ended that may come back.
local function remember(call, pod, cause, attempts, lasted_for, merchant)
  if attempts == '' then attempts = '0' end
  if merchant == '' then merchant = '-' end
  local text = table.concat({pod, cause, attempts, lasted_for, merchant}, ' ')
  run('SET', K.call_end .. call, text, 'PX', RULES.CALL_HISTORY_TTL)
end

-- How a call ended, if that is remembered.
local function end_of(call)
  local text = try('GET', K.call_end .. call)
  if type(text) ~= 'string' then return nil end
  local pod, cause, attempts, lasted_for, merchant = string.match(text, '^(%S+) (%S+) (%d+) (%d+) (%S+)$')
  return pod and {pod = pod, cause = cause, attempts = tonumber(attempts), lasted = tonumber(lasted_for),
    merchant = merchant ~= '-' and merchant or ''}
end

-- Says more of how a call ended; it is not remembered for longer by that.
local function explain(call, ended, cause)
  local left = run('PTTL', K.call_end .. call)
  remember(call, ended.pod, cause, tostring(ended.attempts), ended.lasted, ended.merchant)
  run('PEXPIRE', K.call_end .. call, max(1, left))
end

-- Ends a call that has left its pod's indexes: its record, its lease. `f` is its pod, if
-- that is known.
local function end_call(f, call, record, cause)
  local pod, merchant, attempts, time = record.pod_name, record.merchant_id, record.attempts, lasted(record.at)
  if not f then view('ZREM', K.calls, call) end
  if f and f.calls == 0 then
    run('DEL', K.call .. call, K.lease .. f.pod)
    f.unleased = true
  else
    run('DEL', K.call .. call)
  end
  if merchant ~= '' then view('ZREM', live_key(merchant), call) end
  tell('ended', call, pod or '', '', merchant, cause .. ' ' .. text_of(time))
  -- A hand-off that was taken back never reached the caller.
  if (attempts ~= '' or cause == 'unconfirmed') and pod and record.stage ~= 'handed' and cause ~= 'abandoned' then
    remember(call, pod, cause, attempts, time, merchant)
  end
  if now < trusting_until then
    -- (sweeps keep it short)
    view('ZADD', K.ended, text_of(now), call)
  end
end

-- Notes how a pod has fared, and until when (ms) it is given no calls for that.
local function set_health(f, failures, quarantined_until)
  local was = f.quarantined
  f.failures, f.quarantined = failures, quarantined_until and true or nil
  if quarantined_until and not was then
    tell('quarantined', '', f.pod, '', '', text_of(floor(quarantined_until / 1000)))
  elseif was and not quarantined_until then
    tell('restored', '', f.pod, '')
  end
  run('HSET', f.key, 'failures', failures, 'quarantined_until', quarantined_until or '', 'plain', plain(f))
  if quarantined_until then
    view('ZADD', K.quarantined, quarantined_until, f.pod)
  else
    view('ZREM', K.quarantined, f.pod)
  end
end

-- A call went well on a pod. Answers whether its service changes by that.
local function fared_well(f)
  if (f.failures or 0) == 0 and not f.quarantined then return false end
  local was = f.quarantined
  set_health(f, 0)
  return was
end

-- A call never connected, or broke at once. Three in a row put a pod into
-- quarantine, but never more than a fifth of its pool. Answers as above.
local function fared_badly(f)
  local failures, names = (f.failures or 0) + 1, f.tier and names_of(f.tier)
  if f.quarantined or failures < RULES.QUARANTINE_FAILURES or not names
    or (count('ZCOUNT', names.out, 3, 3) + 1) * RULES.QUARANTINE_SHARE > count('SCARD', names.assigned) then
    f.failures = failures
    run('HSET', f.key, 'failures', failures, 'plain', plain(f))
    return false
  end
  set_health(f, failures, now + RULES.QUARANTINE_TIME)
  return true
end

-- After these nobody is left who would want another pod.
local is_final = {agent = true, provider = true, operator = true}

-- What the end of a call says of its pod. Answers as above.
local function speaks_for(f, cause, lasted_for)
  if cause == 'unconfirmed' then return fared_badly(f) end
  if cause == 'agent' or cause == 'provider' and lasted_for >= RULES.EARLY_FAILURE then return fared_well(f) end
  return false
end
