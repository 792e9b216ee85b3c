-- Returns the state of all pools, in time that does not grow with pods or calls.
-- Replies: {status, now, live calls, waiting calls, {tier table: field, value, ...},
--   {tier, assigned, available, leaving, not ready, in quarantine, waiting calls, calls on its pods (-1 if the indexes
--   do not tell), free slots, ...}, {bounds: tier, text, ...}}

-- Maximum of different numbers of calls per pod, and of pods out of service, that are counted one by one.
local MAX_LEVELS, MAX_OUT = 200, 1000

-- Returns the calls and the free slots of the pods in an index by live calls; nil for more than MAX_LEVELS numbers.
local function load_of_index(key, cap)
  local calls, free, level = 0, 0, '-inf'
  for _ = 1, MAX_LEVELS do
    local first = try('ZRANGEBYSCORE', key, level, '+inf', 'WITHSCORES', 'LIMIT', '0', '1')
    if first.err or #first == 0 then return calls, free end
    local score = first[2]
    local pods = run('ZCOUNT', key, score, score)
    calls, free = calls + pods * tonumber(score), free + pods * max(0, cap - tonumber(score))
    level = '(' .. score
  end
end

-- Returns the calls on pods that are out of service; nil for more than MAX_OUT pods.
local function calls_out_of_service(key)
  if count('ZCARD', key) > MAX_OUT then return nil end
  local pod_names, calls = try('ZRANGE', key, '0', '-1'), 0
  for _, pod_name in ipairs(pod_names) do calls = calls + count('ZCARD', K.pod_calls .. pod_name) end
  return calls
end

-- Returns the calls and the free slots of a pool; -1 where the indexes do not tell. In a pool that is not shared each
-- busy pod counts one call.
local function load_of(keys, kind, assigned, available)
  if assigned == 0 then return 0, 0 end
  local out = calls_out_of_service(keys.out)
  if not kind or not out then return -1, 0 end
  if kind.kind ~= 'shared' then
    return assigned - count('ZCARD', keys.out) - available + out, available
  end
  local calls, free = load_of_index(keys.available, kind.cap)
  local at_risk, free_at_risk = load_of_index(keys.at_risk, kind.cap)
  if not calls or not at_risk then return -1, 0 end
  return calls + at_risk + out, free + free_at_risk
end

local COLUMNS, CALLS = 9, 8

operation('status', function(ARGV)
  if not has_tiers() then return {'lost', now} end
  local tiers, pools, sum = run('HGETALL', K.tiers), {}, 0
  for _, tier in ipairs(try('SMEMBERS', K.pools)) do
    local keys = pool_keys_of(tier)
    local type = run('TYPE', keys.available).ok
    local assigned = count('SCARD', keys.assigned)
    local available = count('ZCARD', keys.at_risk)
      + (type == 'set' and run('SCARD', keys.available) or type == 'zset' and run('ZCARD', keys.available) or 0)
    local calls, free = load_of(keys, kind_of(tier), assigned, available)
    sum = sum + calls
    for _, value in ipairs({tier, assigned, available, count('ZCOUNT', keys.out, 1, 1),
      count('ZCOUNT', keys.out, 2, 2), count('ZCOUNT', keys.out, 3, 3), count('ZCARD', keys.queue), calls, free}) do
      pools[#pools + 1] = value
    end
  end
  local calls = count('ZCARD', K.calls)
  -- The sums differ if a pod that is not shared has several calls, after a change of its tier, or if indexes are wrong.
  for i = CALLS, sum == calls and 0 or #pools, COLUMNS do pools[i] = -1 end
  -- Bounds under a key of another type count as none; the recovery rewrites them.
  local bounds = try('HGETALL', K.tier_bounds)
  if bounds.err then bounds = {} end
  return {'status', now, calls, count('ZCARD', K.waiting), tiers, pools, bounds}
end)
