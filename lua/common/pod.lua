-- pod: the facts of a pod, and the one place that derives its views from them.

-- The facts that views follow from; nil if the pod is not known.
local function facts_of(pod)
  local strings = redis.call('MGET', P .. 'pod:tier:' .. pod, P .. 'pod:draining:' .. pod)
  local fields = read('HMGET', P .. 'pod:' .. pod, 'uid', 'ready', 'terminating', 'pin', 'failures', 'quarantined_until')
  if not fields[1] then return nil end
  local calls = read('ZCARD', P .. 'pod:calls:' .. pod)
  return {
    pod = pod,
    tier = strings[1] or nil,
    draining = strings[2] and true or false,
    uid = fields[1],
    ready = fields[2] == '1',
    terminating = fields[3] == '1',
    pin = fields[4] or '',
    failures = tonumber(fields[5] or 0) or 0,
    quarantined = (fields[6] or '') ~= '',
    calls = calls,
    -- What the views showed when this was read.
    shown = calls,
  }
end

-- The same; nil also where they can't be read, for scripts that see many pods and
-- must not fail for one. The audit reports it.
local function readable_facts_of(pod)
  local readable, f = pcall(facts_of, pod)
  return readable and f or nil
end

local function leaving(f)
  return f.draining or f.terminating
end

local function serving(f)
  return f.ready and not leaving(f) and not f.quarantined
end

-- Reads the table's entry for a pod's pool, and with it until when we trust.
local function read_table(f)
  entry(f.tier and (merchant_of(f.tier) or f.tier) or '')
end

-- The views that follow from a pod's calls: its place among the available, its
-- lease, its status. `only` is its one call, where the script knows it. A pod that
-- `stands` has as many calls as before, and keeps its place.
local function place_calls(f, only)
  local kind = f.tier and not f.stands and kind_of(f.tier)
  if kind then
    local key = available_key(f.tier)
    if kind.kind == 'shared' then
      if serving(f) then view('ZADD', key, f.calls, f.pod) else view('ZREM', key, f.pod) end
    elseif serving(f) and f.calls == 0 then
      view('SADD', key, f.pod)
    else
      view('SREM', key, f.pod)
    end
  end
  local status = leaving(f) and 'draining' or f.calls > 0 and 'allocated' or f.quarantined and 'quarantined' or 'available'
  if f.calls == 0 then
    redis.call('DEL', P .. 'lease:' .. f.pod)
    redis.call('HSET', P .. 'pod:' .. f.pod, 'status', status, 'allocated_call_sid', '', 'allocated_at', '')
    return
  end
  if not only then
    local last = redis.call('ZREVRANGE', P .. 'pod:calls:' .. f.pod, 0, 0, 'WITHSCORES')
    local record = record_of(last[1], 'allocated_at', 'source_pool')
    only = {call = last[1], deadline = tonumber(last[2]), at = record[1] or '', pool = record[2] or ''}
  end
  redis.call('SET', P .. 'lease:' .. f.pod, only.call, 'PX', math.max(1, only.deadline - now) + SLACK)
  redis.call('HSET', P .. 'pod:' .. f.pod, 'status', status, 'allocated_call_sid', only.call,
    'allocated_at', only.at, 'source_pool', only.pool)
end

-- The views that follow from a pod's pool and service.
local function place_service(f)
  if not f.tier then return end
  view('SADD', P .. 'pools', f.tier)
  view('SADD', assigned_key(f.tier), f.pod)
  if serving(f) then
    view('ZREM', out_key(f.tier), f.pod)
  else
    view('ZADD', out_key(f.tier), leaving(f) and 1 or not f.ready and 2 or 3, f.pod)
  end
end

-- All views of a pod.
local function place(f)
  place_service(f)
  place_calls(f)
end

-- Takes a pod out of a view, whatever type the view has.
local function drop(key, pod)
  local kind = redis.call('TYPE', key).ok
  if kind == 'set' then redis.call('SREM', key, pod) end
  if kind == 'zset' then redis.call('ZREM', key, pod) end
end

-- Takes a pod out of all views of its pool.
local function unplace(f)
  if not f.tier then return end
  drop(assigned_key(f.tier), f.pod)
  drop(out_key(f.tier), f.pod)
  drop(available_key(f.tier), f.pod)
end

-- Gives a pod a pool; place must follow.
local function set_home(f, tier)
  view('HSET', P .. 'pod:metadata', f.pod, cjson.encode({tier = tier, name = f.pod}))
  unplace(f)
  f.tier = tier
  redis.call('SET', P .. 'pod:tier:' .. f.pod, tier)
end

-- The pool a pod's label asks for, if there is such a pool.
local function pinned(f)
  if f.pin == '' or merchant_of(f.pin) then return f.pin ~= '' and f.pin or nil end
  local found = entry(f.pin)
  if not found then return nil end
  return found.kind == 'dedicated' and 'merchant:' .. f.pin or f.pin
end

-- The pool for a pod that has none: a merchant pool below its target, else the
-- first tier of the chain below its target, else the last of the chain.
local function home()
  local fields = redis.call('HGETALL', P .. 'tiers')
  local tiers, names, chain = {}, {}, ''
  for i = 1, #fields, 2 do
    if fields[i] == ':chain' then
      chain = fields[i + 1]
    elseif string.sub(fields[i], 1, 1) ~= ':' then
      tiers[fields[i]] = parse_entry(fields[i + 1]) or nil
      if tiers[fields[i]] then names[#names + 1] = fields[i] end
    end
  end
  local function below(tier, target)
    return count('SCARD', assigned_key(tier)) < target
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
  if f.calls > 0 then return false end
  local pin = pinned(f)
  if f.tier and (pin == f.tier or not pin and wanted(f.tier)) then return false end
  if not f.tier and not serving(f) then return false end
  local tier = pin or home()
  if not tier then return false end
  set_home(f, tier)
  return true
end

-- Sets the deadline of a call in all indexes, and how long its record lives, if
-- there is one already. Comes before other writes: what is of the wrong type shows
-- here.
local function extend(f, call, deadline, life, merchant)
  redis.call('ZADD', P .. 'calls', deadline, call)
  if f then redis.call('ZADD', P .. 'pod:calls:' .. f.pod, deadline, call) end
  if life then redis.call('PEXPIRE', P .. 'call:' .. call, life + SLACK) end
  if merchant and merchant ~= '' then view('ZADD', live_key(merchant), deadline, call) end
end

-- How many calls a pod may carry; 0 if none.
local function cap_of(f)
  local kind = f.tier and kind_of(f.tier)
  return kind and serving(f) and (kind.kind == 'shared' and kind.cap or 1) or 0
end

-- Gives a call a pod. `c` is its record: merchant, tried, attempt, stage, attempts.
local function give(f, call, c, deadline, life)
  local at, pool = tostring(math.floor(now / 1000)), source_pool(f.tier)
  extend(f, call, deadline, nil, c.merchant)
  redis.call('HSET', P .. 'call:' .. call, 'pod_name', f.pod, 'source_pool', pool, 'merchant_id', c.merchant or '',
    'allocated_at', at, 'at', now, 'tried', c.tried or '', 'attempt', c.attempt or '', 'stage', c.stage or '',
    'attempts', c.attempts or '')
  redis.call('PEXPIRE', P .. 'call:' .. call, life + SLACK)
  f.calls = f.calls + 1
  place_calls(f, f.calls == 1 and {call = call, deadline = deadline, at = at, pool = pool} or nil)
  return pool
end

-- The record of a call as scripts that end it need it.
local function record_to_end(call)
  local r = record_of(call, 'pod_name', 'source_pool', 'at', 'merchant_id', 'stage', 'attempts', 'attempt')
  return {pod = r[1], pool = r[2], at = r[3], merchant = r[4] or '', stage = r[5] or '', attempts = r[6] or '', attempt = r[7]}
end

-- Remembers how a call ended that may come back.
local function remember(call, pod, cause, attempts, lasted_for, merchant)
  if attempts == '' then attempts = '0' end
  if merchant == '' then merchant = '-' end
  redis.call('SET', P .. 'end:' .. call, table.concat({pod, cause, attempts, lasted_for, merchant}, ' '), 'PX', 3600000)
end

-- How a call ended, if that is remembered.
local function end_of(call)
  local text = redis.pcall('GET', P .. 'end:' .. call)
  if type(text) ~= 'string' then return nil end
  local pod, cause, attempts, lasted_for, merchant = string.match(text, '^(%S+) (%S+) (%d+) (%d+) (%S+)$')
  return pod and {pod = pod, cause = cause, attempts = tonumber(attempts), lasted = tonumber(lasted_for),
    merchant = merchant ~= '-' and merchant or ''}
end

-- Says more of how a call ended; it is not remembered for longer by that.
local function explain(call, ended, cause)
  local left = redis.call('PTTL', P .. 'end:' .. call)
  remember(call, ended.pod, cause, tostring(ended.attempts), ended.lasted, ended.merchant)
  redis.call('PEXPIRE', P .. 'end:' .. call, math.max(1, left))
end

-- Ends a call: its record, its lease, its places in the indexes. `f` is its pod, if
-- that is known, `c` its record.
local function end_call(f, call, c, cause)
  redis.call('ZREM', P .. 'calls', call)
  redis.call('DEL', P .. 'call:' .. call)
  if c.merchant ~= '' then view('ZREM', live_key(c.merchant), call) end
  -- What was taken back was never the caller's.
  if c.pod and c.stage ~= 'handed' and cause ~= 'abandoned' and (c.attempts ~= '' or cause == 'unconfirmed') then
    remember(call, c.pod, cause, c.attempts, lasted(c.at), c.merchant)
  end
  if f and redis.call('ZREM', P .. 'pod:calls:' .. f.pod, call) == 1 then
    f.calls = f.calls - 1
  end
  if now < trusting_until then
    view('ZADD', P .. 'ended', now, call)
    redis.call('ZREMRANGEBYRANK', P .. 'ended', 0, -10001)
    redis.call('PEXPIRE', P .. 'ended', trusting_until - now)
  end
end

-- Notes how a pod has fared, and until when (ms) it is given no calls for that.
local function set_health(f, failures, quarantined_until)
  redis.call('HSET', P .. 'pod:' .. f.pod, 'failures', failures, 'quarantined_until', quarantined_until or '')
  if quarantined_until then
    view('ZADD', P .. 'quarantined', quarantined_until, f.pod)
  else
    view('ZREM', P .. 'quarantined', f.pod)
  end
  f.failures, f.quarantined = failures, quarantined_until and true or false
end

-- A call went well on a pod. Answers whether its service changes by that.
local function fared_well(f)
  if f.failures == 0 and not f.quarantined then return false end
  local was = f.quarantined
  set_health(f, 0)
  return was
end

-- A call never connected, or broke at once. Three in a row put a pod into
-- quarantine, but never more than a fifth of its pool. Answers as above.
local function fared_badly(f)
  if f.quarantined or f.failures < 2 or not f.tier
    or (count('ZCOUNT', out_key(f.tier), 3, 3) + 1) * 5 > count('SCARD', assigned_key(f.tier)) then
    redis.call('HINCRBY', P .. 'pod:' .. f.pod, 'failures', 1)
    f.failures = f.failures + 1
    return false
  end
  set_health(f, f.failures + 1, now + 60000)
  return true
end

-- What the end of a call says of its pod. Answers as above.
local function speaks_for(f, cause, lasted_for)
  if cause == 'unconfirmed' then return fared_badly(f) end
  if cause == 'agent' or cause == 'provider' and lasted_for >= 10000 then return fared_well(f) end
  return false
end
