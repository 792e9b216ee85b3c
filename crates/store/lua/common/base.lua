-- base: time, keys, checked reads. The library begins with it.

-- redis.call, redis.pcall and more that is not there yet while the library is loaded.
local run, try, floor, max, format

-- What one call of a function knows: set when it begins.
local P -- the key prefix
local K -- the keys under it
local now -- the time (ms)
local seconds -- the time (s), as text
-- The tier table, read as needed: kind, cap, strategy, target of a tier.
local entries
-- What is known of tiers already, from the chain in force.
local chain_kinds
-- Until when (ms) a pod's word is enough for a call that nobody knows.
local trusting_until
-- Whether there may be calls that wait; nil before the table was read.
local is_waited_for
-- What pools are called under this prefix.
local names_of

-- redis.pcall for errors of the data, such as a key of the wrong type. Any other error ends the function, such as a
-- command that the user may not run: taken for an error of the data it would replace views and hide records.
local function try_in(pcall)
  return function(...)
    local reply = pcall(...)
    local wrong = type(reply) == 'table' and reply.err
    if wrong and not string.find(wrong, '^WRONGTYPE')
      and (not string.find(wrong, '^ERR') or string.find(wrong, 'user executing the script', 1, true)) then
      error(reply, 0)
    end
    return reply
  end
end

-- What was worked out from a text, kept for the next who asks: `work` has no other
-- source. Bounded, because texts are not.
local function remembered(work)
  local known, size = {}, 0
  return function(text)
    local value = known[text]
    if value == nil then
      if size == 1000 then known, size = {}, 0 end
      value = work(text)
      known[text], size = value, size + 1
    end
    return value
  end
end

-- A whole number as text. Redis writes the numbers it is given as floating point,
-- which takes several times as long.
local function text_of(number)
  return format('%d', number)
end

-- A reply of `try`; names the key where it holds another type than it should.
local function checked(key, reply)
  if type(reply) == 'table' and reply.err then
    error(key .. ': ' .. reply.err, 0)
  end
  return reply
end

local function read(command, key, ...)
  return checked(key, try(command, key, ...))
end

-- Reads or writes a view. A view of the wrong type is replaced: it is derived anyway. The next sweep asks for an audit,
-- which puts back what the view has lost.
local function view(command, key, ...)
  local reply = try(command, key, ...)
  if type(reply) == 'table' and reply.err then
    run('DEL', key)
    run('SET', K.audit_due, '1', 'PX', '60000')
    reply = run(command, key, ...)
  end
  return reply
end

-- Notes what happened, for people: call, pod, source pool, merchant and more, '' for what
-- does not belong to it. KEPT, how many are kept, begins the library.
local function tell(kind, call, pod, pool, merchant, more)
  if KEPT == '0' then return end
  view('XADD', K.events, 'MAXLEN', '~', KEPT, '*', kind,
    call .. ' ' .. pod .. ' ' .. pool .. ' ' .. (merchant or '') .. ' ' .. (more or ''))
end

-- A count of a view; one of the wrong type has nothing to count.
local function count(command, key, ...)
  local reply = try(command, key, ...)
  return type(reply) == 'number' and reply or 0
end

-- Some fields of a call's record, in the order of their names. A key of another type has none.
local function fields_of(call, ...)
  return unpack(try('HMGET', K.call .. call, ...))
end

-- The record of a call. Missing texts are empty; `pod_name`, `source_pool` and `at` are false or nil. A key of another
-- type is an empty record with the error in `err`.
local function record_of(call)
  local reply = try('HMGET', K.call .. call, 'pod_name', 'source_pool', 'merchant_id', 'at', 'stage', 'attempt',
    'attempts', 'tried')
  local pod_name, source_pool, merchant_id, at, stage, attempt, attempts, tried = unpack(reply)
  return {
    pod_name = pod_name,
    source_pool = source_pool,
    merchant_id = merchant_id or '',
    at = at,
    stage = stage or '',
    attempt = attempt or '',
    attempts = attempts or '',
    tried = tried or '',
    err = reply.err,
  }
end

-- The record of a call; fails where the key holds another type.
local function read_record(call)
  local record = record_of(call)
  if record.err then error(K.call .. call .. ': ' .. record.err, 0) end
  return record
end

-- How long a call has lasted that began `at` (ms), by a clock that may step back.
local function lasted(at)
  return max(0, now - (tonumber(at or now) or now))
end

local merchant_of = remembered(function(tier)
  return string.match(tier, '^merchant:(.+)$') or false
end)

-- What a pool is called, by the tier value of its pods (`gold`, `merchant:acme`): the
-- source pool of its calls, and its keys. `out` has the pods that are out of service:
-- score 1 leaving, 2 not ready, 3 quarantined. `queue` has the calls that wait and may
-- use the pool, by whose turn it is.
local function names_under(prefix)
  return remembered(function(tier)
    local id = merchant_of(tier)
    local stem = prefix .. (id and tier or 'pool:' .. tier)
    return {
      source = id and tier or 'pool:' .. tier,
      available = stem .. (id and ':pods' or ':available'),
      assigned = stem .. ':assigned',
      out = stem .. ':out',
      queue = prefix .. 'queue:' .. tier,
    }
  end)
end

-- The live calls of a merchant, by deadline: what its limits count.
local function live_key(merchant)
  return K.merchant .. merchant .. ':calls'
end
local is_pool = remembered(function(text)
  return #text <= 80 and (string.find(text, '^pool:[%w._-]+$') or string.find(text, '^merchant:[%w._-]+$')) ~= nil
end)

-- A source pool as it stands in a record; where people have put something else
-- there, the pool the pod is in, if that is known.
local function pool_text(text, tier)
  return text and is_pool(text) and text or names_of(tier or 'unknown').source
end

-- When a merchant's calls of this second began.
local function rate_key(merchant)
  return K.merchant .. merchant .. ':rate'
end

-- Whether the store is ours and complete: not empty, not being taken over.
local function is_set_up()
  return run('EXISTS', K.schema) == 1
end

-- Whether a tier table is in force. One of the wrong type is none: the recovery writes it again.
local function has_tiers()
  return try('HEXISTS', K.tiers, ':chain') == 1
end

local parse_entry = remembered(function(text)
  local kind, cap, strategy, target = string.match(text, '^(%a+) (%d+) (%a+) (%d+)$')
  return kind and {kind = kind, cap = tonumber(cap), strategy = strategy, target = tonumber(target)} or false
end)

-- The entry of a tier by its name; nil if the table has none.
local function entry(name)
  if not entries then entries = {} end
  if entries[name] == nil then
    local text, trusting, waiting = unpack(try('HMGET', K.tiers, name, ':trusting_until', ':waiting'))
    -- A malformed entry counts as missing; the recovery writes the table again.
    entries[name] = text and parse_entry(text) or false
    trusting_until = tonumber(trusting or 0)
    is_waited_for = waiting and true or false
  end
  return entries[name] or nil
end

local NONE = {}
local DEDICATED = {kind = 'dedicated', cap = 1}

-- What a pod of a pool may carry; nil for a tier that is no more.
local function kind_of(tier)
  local found = chain_kinds[tier]
  if found then return found end
  if merchant_of(tier) then return DEDICATED end
  found = entry(tier)
  return found and found.kind ~= 'dedicated' and found or nil
end

-- Whether the table itself asks for a pool.
local function wanted(tier)
  local id = merchant_of(tier)
  local found = entry(id or tier)
  return found ~= nil and (found.kind == 'dedicated') == (id ~= false)
end

-- Makes a function of an operation. The only key is the prefix of all keys, which tells a
-- cluster where to go, too; the first argument is the latest time (ms) at which it may still
-- do its work, 0 for any. VERSION tells this library from others.
local function operation(name, work)
  redis.register_function({
    function_name = 'smart_router_' .. name .. '_' .. VERSION,
    flags = FLAGS[name] or error('undeclared function ' .. name),
    callback = function(keys, args)
      if not run then
        run, try, floor, max, format = redis.call, try_in(redis.pcall), math.floor, math.max, string.format
      end
      local prefix, not_after = keys[1], args[1]
      if P ~= prefix then P, K, names_of = prefix, keys_under(prefix), names_under(prefix) end
      local clock = run('TIME')
      seconds = clock[1]
      now = seconds * 1000 + floor(clock[2] / 1000)
      if not_after ~= '0' and now > tonumber(not_after) then return {'late', now} end
      entries, chain_kinds, trusting_until, is_waited_for = nil, NONE, 0, nil
      return work(args)
    end,
  })
end
