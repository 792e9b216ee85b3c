-- prelude: time, keys, checked reads, call records. The library begins with this file.

-- Returns redis.call, redis.pcall and functions of Lua.
local function builtins()
  return redis.call, redis.pcall, type, tonumber, unpack, math.floor, math.max, string.format
end

-- The same as local names, because a global name costs a look-up in a table at each use. They are set at the first
-- call: Redis does not provide them before.
local run, run_protected, type, tonumber, unpack, floor, max, format

-- State of one function call, set when it begins.
local P -- key prefix
local K -- keys under the prefix
local pool_keys_of -- names of a pool under the prefix, by tier
local now -- time (ms)
local seconds -- time (s), as text
local is_read_only -- the function may not write
local tier_entries -- cached entries of the tier table: kind, cap, strategy, target
local chain_kinds -- kinds of the tiers of the default chain
local ordered_merchants -- kinds of the merchant pools whose calls prefer low ordinals
local trusting_until -- end of the re-registration window (ms)
local has_waiting_calls -- false only if no call waits; nil before the tier table was read
local has_dials -- false only if no reservation is outstanding; nil before the tier table was read
local has_numbers -- whether numbers have limits of lines; nil before the tier table was read

-- Ends the function unless an error reply is an error of the data, such as a key of the wrong type. A command denied by
-- an ACL, handled as an error of the data, would replace indexes.
local function end_unless_data_error(reply)
  local err = reply.err
  if not string.find(err, '^WRONGTYPE')
    and (not string.find(err, '^ERR') or string.find(err, 'user executing the script', 1, true)) then
    error(reply, 0)
  end
end

-- Runs a command. Returns errors of the data; any other error ends the function.
local function try(...)
  local reply = run_protected(...)
  if type(reply) == 'table' and reply.err then end_unless_data_error(reply) end
  return reply
end

-- Memoizes a function of one text. The cache is bounded because texts come from requests.
local function memoized(work)
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

-- Formats a whole number. Redis formats number arguments as floating point, which takes several times as long. Calls of
-- the same millisecond have the same times, so that a busy store formats most numbers once.
local text_of = memoized(function(number)
  return format('%d', number)
end)

-- Returns a reply of `try`; an error reply ends the function with an error that names the key.
local function checked(key, reply)
  if type(reply) == 'table' and reply.err then
    error(key .. ': ' .. reply.err, 0)
  end
  return reply
end

local function read(command, key, ...)
  return checked(key, try(command, key, ...))
end

-- Replaces an index of the wrong type, since it is derived, and runs the command that failed again. The next sweep
-- requests an audit, which fills the index.
local function replace_index(reply, command, key, ...)
  end_unless_data_error(reply)
  run('DEL', key)
  run('SET', K.audit_due, '1', 'PX', '60000')
  return run(command, key, ...)
end

-- Runs a command on an index; replaces an index of the wrong type.
local function run_index(command, key, ...)
  local reply = run_protected(command, key, ...)
  if type(reply) == 'table' and reply.err then return replace_index(reply, command, key, ...) end
  return reply
end

-- Events since the log was last trimmed. Redis removes whole nodes of 100 events, so that most trims remove nothing.
local untrimmed = 0

-- Appends an event to the event log: call, pod, source pool, merchant and detail, '' where one does not apply.
-- EVENT_LIMIT, declared at the start of the library, is the approximate length of the log; '0' disables it.
local function record_event(kind, call, pod_name, pool, merchant, detail)
  if EVENT_LIMIT == '0' then return end
  local key, reply = K.events, nil
  local text = call .. ' ' .. pod_name .. ' ' .. pool .. ' ' .. (merchant or '') .. ' ' .. (detail or '')
  if untrimmed == 0 then
    reply = run_protected('XADD', key, 'MAXLEN', '~', EVENT_LIMIT, '*', kind, text)
  else
    reply = run_protected('XADD', key, '*', kind, text)
  end
  untrimmed = (untrimmed + 1) % RULES.EVENTS_PER_TRIM
  if type(reply) == 'table' then replace_index(reply, 'XADD', key, '*', kind, text) end
end

-- Runs a counting command on an index; an index of the wrong type counts as empty.
local function count(command, key, ...)
  local reply = try(command, key, ...)
  return type(reply) == 'number' and reply or 0
end

-- Returns fields of a call's record in the order of their names; none of a key of another type.
local function fields_of(call, ...)
  return unpack(try('HMGET', K.call .. call, ...))
end

-- Reads the fields that have another name in the other schema from a record that has none of this schema's names.
-- Functions that may write rename them at the same time, so that all later writes find one set of names only.
local function fields_of_other_schema(call)
  local request_ids, pod_attempt = fields_of(call, OTHER_REQUEST_IDS, OTHER_POD_ATTEMPT)
  if (request_ids or pod_attempt) and not is_read_only then
    local key = K.call .. call
    if request_ids then run('HSET', key, REQUEST_IDS, request_ids) end
    if pod_attempt then run('HSET', key, POD_ATTEMPT, pod_attempt) end
    run('HDEL', key, OTHER_REQUEST_IDS, OTHER_POD_ATTEMPT)
  end
  return request_ids, pod_attempt
end

-- Returns the reply with the fields of a call's record, in the order of `record_from`.
local function record_fields(call)
  return try('HMGET', K.call .. call, 'pod_name', 'source_pool', 'merchant_id', 'at', 'stage', REQUEST_IDS,
    POD_ATTEMPT, 'tried', 'stream', 'failovers', 'number')
end

-- Returns the record of a call from the reply with its fields. Missing texts are empty; `pod_name`, `source_pool` and
-- `at` are false or nil. A key of another type is an empty record with the error in `err`.
local function record_from(call, reply)
  local pod_name, source_pool, merchant_id, at, stage, request_ids, pod_attempt, tried, stream, failovers, number =
    unpack(reply)
  if not request_ids and not pod_attempt and (pod_name or stage) then
    request_ids, pod_attempt = fields_of_other_schema(call)
  end
  return {
    pod_name = pod_name,
    source_pool = source_pool,
    merchant_id = merchant_id or '',
    at = at,
    stage = stage or '',
    request_ids = request_ids or '',
    pod_attempt = pod_attempt or '',
    tried = tried or '',
    stream = stream or nil,
    failovers = failovers or '',
    number = number or '',
    err = reply.err,
  }
end

local function record_of(call)
  return record_from(call, record_fields(call))
end

-- Returns the record of a call, from the reply with its fields if it was read; fails if the key holds another type.
local function read_record(call, fields)
  local record = record_from(call, fields or record_fields(call))
  if record.err then error(K.call .. call .. ': ' .. record.err, 0) end
  return record
end

-- Stages of a provisional call, and the cause of its end if its lease expires. The stream of an unattached call comes
-- through a gateway, so that a stream that never came is no failure of the pod.
local PROVISIONAL = {provisional = 'unconfirmed', unattached = 'unattached'}

-- Returns the stream that a gateway relays for a call, from its record: gateway, stream id, start (ms) and the order
-- for the gateway ('' for none): the cause with which the call was released, 'stream' if its provider reports the end
-- of the stream, or 'displaced' if the stream has to leave its pod. Returns nil for a call without a stream, or with a
-- malformed one.
local function stream_of(record)
  if not record.stream or not record.pod_name then return nil end
  local gateway, id, since, ending = string.match(record.stream, '^([%l%d.-]+) (%x+) (%d+) ([%l_]*)$')
  return gateway and {gateway = gateway, id = id, since = since, ending = ending}
end

-- Returns the ordinal of a call's pod in its conversation: more than 1 if the call had another pod before.
local function ordinal_of(record)
  return max(1, tonumber(record.pod_attempt) or 0) + (tonumber(record.failovers) or 0)
end

-- Returns the duration (ms) of a call that began `at` (ms); 0 after a backward clock step.
local function lasted(at)
  return max(0, now - (tonumber(at or now) or now))
end

local merchant_of = memoized(function(tier)
  return string.match(tier, '^merchant:(.+)$') or false
end)

-- Returns a function from the tier value of pods (`gold`, `merchant:acme`) to the source pool of their calls and the
-- keys of their pool. `at_risk` has the available pods that the cluster is about to disrupt, by live calls. `out` has
-- the pods out of service: score 1 leaving, 2 not ready, 3 quarantined. `queue` has the waiting calls that may use the
-- pool, in the order of their turn.
local function pool_keys_under(prefix)
  return memoized(function(tier)
    local id = merchant_of(tier)
    local stem = prefix .. (id and tier or 'pool:' .. tier)
    return {
      source = id and tier or 'pool:' .. tier,
      available = stem .. (id and ':pods' or ':available'),
      at_risk = stem .. ':at_risk',
      assigned = stem .. ':assigned',
      out = stem .. ':out',
      queue = prefix .. 'queue:' .. tier,
    }
  end)
end

-- Returns the key of a merchant's calls by deadline, which its limits count.
local function live_key(merchant)
  return K.merchant .. merchant .. ':calls'
end

-- Returns the key of a merchant's waiting calls by the deadline of their next request.
local function waiting_key(merchant)
  return K.merchant .. merchant .. ':waiting'
end

-- Returns the key of a merchant's outstanding reservations by deadline, which its limits count too. A call may have the
-- name of a reservation, so that one index cannot hold both.
local function dials_key(merchant)
  return K.merchant .. merchant .. ':dials'
end

local is_pool = memoized(function(text)
  return #text <= 80 and (string.find(text, '^pool:[%w._-]+$') or string.find(text, '^merchant:[%w._-]+$')) ~= nil
end)

-- Returns the source pool of a record. A malformed one, edited by hand, is replaced by the pool of the pod if known.
local function pool_text(text, tier)
  return text and is_pool(text) and text or pool_keys_of(tier or 'unknown').source
end

-- Returns the key of the start times of a merchant's calls within the rate window.
local function rate_key(merchant)
  return K.merchant .. merchant .. ':rate'
end

-- Returns whether the store is set up: neither empty nor being adopted.
local function is_set_up()
  return run('EXISTS', K.schema) == 1
end

-- Returns whether a tier table is in force. The recovery rewrites a table of the wrong type.
local function has_tiers()
  return try('HEXISTS', K.tiers, ':chain') == 1
end

local parse_entry = memoized(function(text)
  local kind, cap, strategy, target = string.match(text, '^(%a+) (%d+) (%a+) (%d+)$')
  return kind and {kind = kind, cap = tonumber(cap), strategy = strategy, target = tonumber(target)} or false
end)

-- Returns the entry of a tier in the tier table; nil if it has none.
local function tier_entry(name)
  if not tier_entries then tier_entries = {} end
  if tier_entries[name] == nil then
    local text, trusting, waiting, dials =
      unpack(try('HMGET', K.tiers, name, ':trusting_until', ':waiting', ':dials'))
    -- A malformed entry counts as missing; the recovery rewrites the table.
    tier_entries[name] = text and parse_entry(text) or false
    trusting_until = tonumber(trusting or 0)
    has_waiting_calls, has_dials = waiting and true or false, dials and true or false
  end
  return tier_entries[name] or nil
end

-- Parses the merchant pools whose calls prefer low ordinals, which follow the chain in its text: their kinds by tier.
local parse_ordered = memoized(function(chain)
  local kinds = {}
  for name in string.gmatch(chain, '~(%S+)') do
    kinds['merchant:' .. name] = {kind = 'dedicated', cap = 1, strategy = 'ordinal'}
  end
  return kinds
end)

local NONE = {}
local DEDICATED = {kind = 'dedicated', cap = 1}

-- Returns kind, cap and strategy of a pool; nil for an unknown tier.
local function kind_of(tier)
  local kind = chain_kinds[tier]
  if kind then return kind end
  if merchant_of(tier) then return ordered_merchants[tier] or DEDICATED end
  kind = tier_entry(tier)
  return kind and kind.kind ~= 'dedicated' and kind or nil
end

-- Returns whether the tier table defines a pool.
local function is_defined(tier)
  local id = merchant_of(tier)
  local entry = tier_entry(id or tier)
  return entry ~= nil and (entry.kind == 'dedicated') == (id ~= false)
end

-- Registers the function of an operation. Its only key is the prefix of all keys, which also routes it in a cluster.
-- The first argument is the request deadline (ms), 0 for none. VERSION distinguishes this library from others.
local function operation(name, work)
  local flags = FLAGS[name] or error('undeclared function ' .. name)
  local has_no_writes = flags[1] == 'no-writes'
  redis.register_function({
    function_name = 'smart_router_' .. name .. '_' .. VERSION,
    flags = flags,
    callback = function(keys, args)
      if not run then run, run_protected, type, tonumber, unpack, floor, max, format = builtins() end
      local prefix, not_after = keys[1], args[1]
      if P ~= prefix then P, K, pool_keys_of = prefix, keys_under(prefix), pool_keys_under(prefix) end
      local clock = run('TIME')
      seconds = clock[1]
      now = seconds * 1000 + floor(clock[2] / 1000)
      if not_after ~= '0' and now > tonumber(not_after) then return {'late', now} end
      tier_entries, chain_kinds, ordered_merchants, trusting_until, has_waiting_calls = nil, NONE, NONE, 0, nil
      has_dials, has_numbers = nil, nil
      is_read_only = has_no_writes
      return work(args)
    end,
  })
end
