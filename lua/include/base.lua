-- base: time, keys, checked reads. Every script begins with it.
-- ARGV[1] is the key prefix; ARGV[2] the latest time (ms) at which the script may
-- still do its work, 0 for any; KEYS[1] only tells a cluster where to go.
local P = ARGV[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
if ARGV[2] ~= '0' and now > tonumber(ARGV[2]) then
  return {'late', now}
end

-- How much longer a key lives than what it stands for (ms): deadlines end
-- calls and drains, a TTL only tidies up where no router is left.
local SLACK = 30000

-- Reads, and names the key where it holds another type than it should.
local function read(command, key, ...)
  local reply = redis.pcall(command, key, ...)
  if type(reply) == 'table' and reply.err then
    error(key .. ': ' .. reply.err, 0)
  end
  return reply
end

-- Writes to a view. A view of the wrong type is replaced: it is derived anyway.
local function view(command, key, ...)
  local reply = redis.pcall(command, key, ...)
  if type(reply) == 'table' and reply.err then
    redis.call('DEL', key)
    reply = redis.call(command, key, ...)
  end
  return reply
end

-- A count of a view; one of the wrong type has nothing to count.
local function count(command, key, ...)
  local reply = redis.pcall(command, key, ...)
  return type(reply) == 'number' and reply or 0
end

-- Fields of a call's record; none where the key holds something else.
local function record_of(call, ...)
  local record = redis.pcall('HMGET', P .. 'call:' .. call, ...)
  return record.err and {} or record
end

-- How long a call has lasted that began `at` (ms), by a clock that may step back.
local function lasted(at)
  return math.max(0, now - (tonumber(at or now) or now))
end

local function merchant_of(tier)
  return string.match(tier, '^merchant:(.+)$')
end

-- The keys of a pool, by the tier value of its pods (`gold`, `merchant:acme`).
local function available_key(tier)
  local id = merchant_of(tier)
  return id and P .. 'merchant:' .. id .. ':pods' or P .. 'pool:' .. tier .. ':available'
end
local function assigned_key(tier)
  local id = merchant_of(tier)
  return id and P .. 'merchant:' .. id .. ':assigned' or P .. 'pool:' .. tier .. ':assigned'
end
-- Pods of a pool that are out of service: score 1 leaving, 2 not ready, 3 quarantined.
local function out_key(tier)
  local id = merchant_of(tier)
  return id and P .. 'merchant:' .. id .. ':out' or P .. 'pool:' .. tier .. ':out'
end
-- The live calls of a merchant, by deadline: what its limits count.
local function live_key(merchant)
  return P .. 'merchant:' .. merchant .. ':calls'
end
-- Calls that wait and may use a pool, by whose turn it is.
local function queue_key(tier)
  return P .. 'queue:' .. tier
end
local function source_pool(tier)
  return merchant_of(tier) and tier or 'pool:' .. tier
end

-- A source pool as it stands in a record; where people have put something else
-- there, the pool the pod is in, if that is known.
local function pool_text(text, tier)
  if text and #text <= 80 and (string.find(text, '^pool:[%w._-]+$') or string.find(text, '^merchant:[%w._-]+$')) then
    return text
  end
  return source_pool(tier or 'unknown')
end

-- Whether the store is ours and complete: not empty, not being taken over.
local function is_set_up()
  return redis.call('EXISTS', P .. 'schema') == 1
end

-- The tier table, read as needed: kind, cap, strategy, target of a tier.
local entries = {}
-- Until when (ms) a pod's word is enough for a call that nobody knows.
local trusting_until = 0
-- Whether there may be calls that wait; nil before the table was read.
local is_waited_for

local function parse_entry(text)
  local kind, cap, strategy, target = string.match(text, '^(%a+) (%d+) (%a+) (%d+)$')
  return kind and {kind = kind, cap = tonumber(cap), strategy = strategy, target = tonumber(target)}
end

-- The entry of a tier by its name; nil if the table has none.
local function entry(name)
  if entries[name] == nil then
    local found = read('HMGET', P .. 'tiers', name, ':trusting_until', ':waiting')
    entries[name] = found[1] and parse_entry(found[1]) or false
    -- (an entry that makes no sense is none; the table is written anew soon)
    trusting_until = tonumber(found[2] or 0)
    is_waited_for = found[3] and true or false
  end
  return entries[name] or nil
end

local DEDICATED = {kind = 'dedicated', cap = 1}

-- What a pod of a pool may carry; nil for a tier that is no more.
local function kind_of(tier)
  if merchant_of(tier) then return DEDICATED end
  local found = entry(tier)
  return found and found.kind ~= 'dedicated' and found or nil
end

-- Whether the table itself asks for a pool.
local function wanted(tier)
  local id = merchant_of(tier)
  local found = entry(id or tier)
  return found ~= nil and (found.kind == 'dedicated') == (id ~= nil)
end
