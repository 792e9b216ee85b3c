#!lua
-- Gives a call a pod, says again which one it has, or lets it wait.
-- ARGV[3..11]: call, merchant ('' for none), lease (ms), life of the record (ms), attempt, stage ('provisional' if its
--   stream has to start before it is sure, else ''), number of the attempt ('' where nobody counts), how it may wait
--   ('' or: time, patience, most calls, most of its merchant), what was before ('' or: pod, number, '1' if that is final, retries)
-- Replies: {existing, now, pod, source pool, tried, number of the attempt}
--          {new, now, pod, source pool, tried, number of the attempt, how long it waited ('' if it did not), why the merchant's document is malformed}
--          {refused, now, tried, why malformed, why refused}: no_pods, max_calls, max_rate, queue_full, over, unsettled, spent
--          {refused, now, tried, '', time_over, how long it waited}
--          {refused, now, tried, why malformed, waiting, until, is new (1, 0)}
--          {lost, now}: the store is empty   {late, now}
-- include: base
-- include: pod
-- include: queue
-- include: draw
-- include: again
-- The pod that a call whose stream is gone has just left; whether it is known to have
-- had one.
local before, is_rescue
if after and record[1] then
  is_rescue = true
  if record[1] == after.pod and (tonumber(record[6] or 0) or 0) == after.attempt and record[5] ~= 'handed' then
    if not after.is_final then return {'refused', now, '', '', 'unsettled'} end
    before = facts_of(record[1])
    if before then read_table(before) end
    end_call(before, call, {pod = record[1], at = record[8], merchant = record[7] or '', stage = record[5] or '',
      attempts = record[6] or ''}, 'broken')
    if before then
      local changed = lasted(record[8]) < 10000 and fared_badly(before)
      if after.is_last then
        resettle(before, changed)
      elseif settle(before) or changed then
        place(before)
      else
        place_calls(before)
      end
    end
    if after.is_last then return {'refused', now, '', '', 'spent'} end
    record = {}
  end
elseif after and record[5] == 'waiting' then
  is_rescue = true
elseif after then
  local ended = end_of(call)
  is_rescue = ended ~= nil
  if ended and (ended.attempts ~= after.attempt or ended.cause == 'agent' or ended.cause == 'provider') then
    return {'refused', now, '', '', 'over'}
  end
  local may_be_explained = ended and ended.cause ~= 'pod_gone'
  if may_be_explained and not after.is_final then return {'refused', now, '', '', 'unsettled'} end
  if ended and ended.cause == 'stream' then
    explain(call, ended, 'broken')
    local f = ended.lasted < 10000 and facts_of(ended.pod)
    if f and fared_badly(f) then place(f) end
  end
  if after.is_last then return {'refused', now, '', '', 'spent'} end
end

local again = told_again()
if again then return again end
local in_force = read('HMGET', P .. 'tiers', ':chain', ':waiting')
local default_chain = in_force[1]
if not default_chain then return {'lost', now} end
is_waited_for = in_force[2] and true or false

local function is_name(text)
  return type(text) == 'string' and #text >= 1 and #text <= 64
    and not string.find(text, '[^%w._-]') and text ~= '.' and text ~= '..'
end

local function is_step(text)
  return is_name(text) or type(text) == 'string' and is_name(merchant_of(text))
end

-- How much the merchant may have at most, as its document says.
local limits = {}
-- Whose calls come first where they have to wait.
local priority = 0

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
  local first = given('priority')
  if first ~= nil and not (is_limit(first, 100) or type(first) == 'number' and is_limit(-first, 100)) then
    return nil, 'priority: expected a whole number'
  end
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
  priority = given('priority') or 0
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

-- Counts a call that was let in as one of this second.
local function admit()
  if limits.rate and not is_rescue then
    view('LPUSH', rate_key, now)
    redis.call('LTRIM', rate_key, 0, limits.rate - 1)
    redis.call('PEXPIRE', rate_key, 1000)
  end
end

-- Hands what the call has left to others, once it is clear that it does not need it.
local function pass_on()
  local f = before and readable_facts_of(before.pod)
  if f then serve(f) end
end

local limit = not is_rescue and exceeded()
if limit then return {'refused', now, '', malformed, limit} end

-- Walks the chain; the pod found, and what was tried before.
local function walk(avoid)
  local tried = {}
  for _, step in ipairs(steps) do
    local f, reason
    if step.kind then f, reason = draw(step.tier, step.kind, avoid) else reason = 'unknown' end
    if f then return f, table.concat(tried, ' ') end
    tried[#tried + 1] = step.step .. '=' .. reason
  end
  return nil, table.concat(tried, ' ')
end

local f, tried = walk(after and after.pod)
if after and not f then f, tried = walk() end
if f then
  admit()
  local pool = give(f, call, {merchant = merchant, tried = tried, attempt = attempt, stage = stage, attempts = attempts},
    now + lease, life)
  if stage ~= '' then redis.call('DEL', P .. 'end:' .. call) end
  pass_on()
  return {'new', now, f.pod, pool, tried, attempts, '', malformed}
end

local pools = {}
for _, step in ipairs(steps) do
  if step.tier then pools[#pools + 1] = step.tier end
end
if hold_time == 0 or #pools == 0 then
  pass_on()
  return {'refused', now, tried, malformed, 'no_pods'}
end
-- Those whose records somebody has deleted are long overdue there.
local theirs = P .. 'merchant:' .. merchant .. ':waiting'
if merchant ~= '' and count('ZCARD', theirs) >= tonumber(most_per_merchant) then
  redis.pcall('ZREMRANGEBYSCORE', theirs, '-inf', now - 60000)
end
if count('ZCARD', P .. 'waiting') >= tonumber(most) or merchant ~= '' and count('ZCARD', theirs) >= tonumber(most_per_merchant) then
  pass_on()
  return {'refused', now, tried, malformed, 'queue_full'}
end
-- Higher priorities first, then who came first. A call that had a pod came before
-- all who wait.
local ticket = view('INCR', P .. 'tickets') - (is_rescue and 2199023255552 or 0)
local score = -priority * 4398046511104 + ticket
local ends = now + hold_time
set_place(call, {merchant = merchant, pools = table.concat(pools, ' '), score = score, since = now, ends = ends,
  tried = tried, attempts = attempts, poll_by = next_poll(ends, patience)})
admit()
pass_on()
return {'refused', now, tried, malformed, 'waiting', ends, 1}
