#!lua
-- Gives a call a pod, or says again which one it has.
-- ARGV[3..8]: call, merchant ('' for none), lease (ms), life of the record (ms), attempt,
--   '1' if its stream has to start before it is sure
-- Replies: {existing, now, pod, source pool, tried}
--          {new, now, pod, source pool, tried, why the merchant's document is malformed}
--          {refused, now, tried, why malformed, limit that would be exceeded ('' for none)}   {lost, now}: the store is empty   {late, now}
-- include: base
-- include: pod
local call, merchant, lease, life, attempt = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local call_key = P .. 'call:' .. call
local record = read('HMGET', call_key, 'pod_name', 'source_pool', 'tried', 'attempt')
if record[1] then
  -- The same attempt again: its first answer was lost.
  local pool = pool_text(record[2])
  if record[4] == attempt then return {'new', now, record[1], pool, record[3] or '', ''} end
  -- Two have asked by now; neither may take the call from the other.
  if record[4] and record[4] ~= '' then redis.call('HDEL', call_key, 'attempt') end
  return {'existing', now, record[1], pool, record[3] or ''}
end
local default_chain = read('HGET', P .. 'tiers', ':chain')
if not default_chain then return {'lost', now} end

local function is_name(text)
  return type(text) == 'string' and #text >= 1 and #text <= 64
    and not string.find(text, '[^%w._-]') and text ~= '.' and text ~= '..'
end

local function is_step(text)
  return is_name(text) or type(text) == 'string' and is_name(merchant_of(text))
end

-- How much the merchant may have at most, as its document says.
local limits = {}

local function is_limit(value, most)
  return type(value) == 'number' and value >= 0 and value <= most and value % 1 == 0
end

-- The steps of a merchant's document, or nil and what is wrong with it. No steps
-- and nothing wrong means the default chain.
local function merchant_steps(document)
  if #document > 4096 then return nil, 'longer than 4096 bytes' end
  if not string.find(document, '^%s*{') then return nil, 'not a JSON object' end
  -- JSON has no NaN and no hexadecimal numbers; cjson has, unless told otherwise.
  cjson.decode_invalid_numbers(false)
  local ok, fields = pcall(cjson.decode, document)
  cjson.decode_invalid_numbers(true)
  if not ok then return nil, 'not JSON' end
  local function given(name)
    local value = fields[name]
    if value == cjson.null then return nil end
    return value
  end
  local pool, fallback, only = given('pool'), given('fallback'), given('dedicated_only')
  if pool == '' then pool = nil end
  if pool ~= nil and not is_name(pool) then return nil, 'pool: expected a name' end
  if only ~= nil and type(only) ~= 'boolean' then return nil, 'dedicated_only: expected true or false' end
  local max_calls, max_rate = given('max_calls'), given('max_rate')
  if max_calls ~= nil and not is_limit(max_calls, 1000000) then return nil, 'max_calls: expected a whole number' end
  if max_rate ~= nil and not is_limit(max_rate, 1000) then return nil, 'max_rate: expected a whole number' end
  local steps = {}
  if pool then steps[1] = 'merchant:' .. pool end
  if fallback ~= nil then
    -- Once decoded, an object is a table, too, and an empty one looks like a list.
    local is_list = type(fallback) == 'table' and (#fallback > 0 or next(fallback) == nil)
    if is_list and #fallback == 0 then is_list = not string.find(document, '"fallback"%s*:%s*{') end
    if not is_list then return nil, 'fallback: expected a list' end
    if #fallback > 16 then return nil, 'fallback: more than 16 steps' end
    for _, step in ipairs(fallback) do
      if not is_step(step) then return nil, 'fallback: expected names' end
    end
  end
  limits = {calls = max_calls, rate = max_rate}
  if only then return steps end
  if fallback == nil or #fallback == 0 then return steps, nil, true end
  for _, step in ipairs(fallback) do steps[#steps + 1] = step end
  return steps
end

-- The steps to take: {step, tier, kind}; tier and kind are nil where unknown.
local steps, malformed = {}, ''
local then_default = true
local document = merchant ~= '' and read('HGET', P .. 'merchant:config', merchant)
if document then
  local own, wrong, goes_on = merchant_steps(document)
  malformed = wrong or ''
  then_default = own == nil or goes_on == true
  for _, step in ipairs(own or {}) do
    local tier = step
    if not merchant_of(step) then
      local found = entry(step)
      tier = found and (found.kind == 'dedicated' and 'merchant:' .. step or step)
    end
    steps[#steps + 1] = {step = step, tier = tier, kind = tier and kind_of(tier)}
  end
end
if then_default then
  for name, kind, cap, strategy in string.gmatch(default_chain, '(%S+)=(%a+):(%d+):(%a+)') do
    local found = {kind = kind, cap = tonumber(cap), strategy = strategy}
    entries[name] = entries[name] or found
    steps[#steps + 1] = {step = name, tier = name, kind = found}
  end
end

-- The limit that the call would exceed; nil if none.
local rate_key = P .. 'merchant:' .. merchant .. ':rate'
local function exceeded()
  if limits.calls then
    local key = live_key(merchant)
    local live = count('ZCARD', key)
    if live >= limits.calls then
      -- Calls whose records someone has deleted by hand are long overdue here.
      redis.pcall('ZREMRANGEBYSCORE', key, '-inf', now - 60000)
      live = count('ZCARD', key)
    end
    if live >= limits.calls then return 'max_calls' end
  end
  if limits.rate == 0 then return 'max_rate' end
  if limits.rate then
    local nth = redis.pcall('LINDEX', rate_key, limits.rate - 1)
    if type(nth) == 'string' and now - (tonumber(nth) or 0) < 1000 then return 'max_rate' end
  end
end

-- A pod of a pool that takes the call; nil and why there is none.
local function draw(tier, kind)
  local key = available_key(tier)
  local function try(pods)
    if type(pods) ~= 'table' or pods.err then return nil end
    for _, pod in ipairs(pods) do
      local f = readable_facts_of(pod)
      local room = f and f.calls < (kind.kind == 'shared' and kind.cap or 1)
      if room and f.tier == tier and serving(f) then return f end
    end
  end
  local found
  if kind.kind ~= 'shared' then
    found = try(redis.pcall('SRANDMEMBER', key, 1)) or try(redis.pcall('SRANDMEMBER', key, 16))
  elseif kind.strategy == 'pack' then
    found = try(redis.pcall('ZREVRANGEBYSCORE', key, '(' .. kind.cap, '-inf', 'LIMIT', 0, 1))
      or try(redis.pcall('ZREVRANGEBYSCORE', key, '(' .. kind.cap, '-inf', 'LIMIT', 1, 16))
  else
    found = try(redis.pcall('ZRANGEBYSCORE', key, '-inf', '(' .. kind.cap, 'LIMIT', 0, 1))
      or try(redis.pcall('ZRANGEBYSCORE', key, '-inf', '(' .. kind.cap, 'LIMIT', 1, 16))
  end
  if found then return found end
  local out = out_key(tier)
  if count('SCARD', assigned_key(tier)) > count('ZCARD', out) then return nil, 'at_capacity' end
  if count('ZCOUNT', out, 1, 1) > 0 then return nil, 'all_draining' end
  return nil, 'empty'
end

local limit = exceeded()
if limit then return {'refused', now, '', malformed, limit} end
local tried = {}
for _, step in ipairs(steps) do
  local f, reason
  if step.kind then f, reason = draw(step.tier, step.kind) else reason = 'unknown' end
  if f then
    local deadline, at, pool = now + lease, tostring(math.floor(now / 1000)), source_pool(step.tier)
    local told = table.concat(tried, ' ')
    extend(f, call, deadline, nil, merchant)
    redis.call('HSET', call_key, 'pod_name', f.pod, 'source_pool', pool, 'merchant_id', merchant,
      'allocated_at', at, 'at', now, 'tried', told, 'attempt', attempt, 'provisional', ARGV[8])
    redis.call('PEXPIRE', call_key, life + SLACK)
    if ARGV[8] == '1' then
      view('SADD', P .. 'provisional', call)
      redis.call('DEL', P .. 'missed:' .. call)
    end
    if limits.rate then
      view('LPUSH', rate_key, now)
      redis.call('LTRIM', rate_key, 0, limits.rate - 1)
      redis.call('PEXPIRE', rate_key, 1000)
    end
    f.calls = f.calls + 1
    place_calls(f, f.calls == 1 and {call = call, deadline = deadline, at = at, pool = pool} or nil)
    return {'new', now, f.pod, pool, told, malformed}
  end
  tried[#tried + 1] = step.step .. '=' .. reason
end
return {'refused', now, table.concat(tried, ' '), malformed, ''}
