-- merchant_config: a merchant's document.

local function is_name(text)
  return type(text) == 'string' and #text >= 1 and #text <= 64
    and not string.find(text, '[^%w._-]') and text ~= '.' and text ~= '..'
end

local function is_step(text)
  return is_name(text) or type(text) == 'string' and is_name(merchant_of(text))
end

local function is_whole(value, maximum)
  return type(value) == 'number' and value >= 0 and value <= maximum and value % 1 == 0
end

local function is_list(value, document)
  if type(value) ~= 'table' then return false end
  if #value > 0 then return true end
  -- cjson decodes an object to a table as well, and an empty one looks like an empty list.
  return next(value) == nil and not string.find(document, '"fallback"%s*:%s*{')
end

-- Returns the configuration of a merchant without a usable document: the default chain. `malformed` is the error.
local function default_config(malformed)
  return {steps = {}, has_default_chain = true, priority = 0, malformed = malformed or ''}
end
local DEFAULT_CONFIG = default_config()

-- Parses a document: the steps of its chain, whether the default chain follows them, limits of live calls and of calls
-- per second (nil for none), priority in the queues, and the error of a malformed document.
local parse_config = memoized(function(document)
  if not string.find(document, '^%s*{') then return default_config('not a JSON object') end
  -- JSON has no NaN and no hexadecimal numbers; cjson accepts them by default.
  cjson.decode_invalid_numbers(false)
  local ok, fields = pcall(cjson.decode, document)
  cjson.decode_invalid_numbers(true)
  if not ok then return default_config('not JSON') end
  local function given(name)
    local value = fields[name]
    if value == cjson.null then return nil end
    return value
  end
  local pool, fallback, only = given('pool'), given('fallback'), given('dedicated_only')
  local max_calls, max_rate, priority = given('max_calls'), given('max_rate'), given('priority')
  if pool == '' then pool = nil end
  if pool ~= nil and not is_name(pool) then return default_config('pool: expected a name') end
  if only ~= nil and type(only) ~= 'boolean' then return default_config('dedicated_only: expected true or false') end
  if max_calls ~= nil and not is_whole(max_calls, RULES.MAX_MERCHANT_CALLS) then
    return default_config('max_calls: expected a whole number')
  end
  if max_rate ~= nil and not is_whole(max_rate, RULES.MAX_MERCHANT_RATE) then
    return default_config('max_rate: expected a whole number')
  end
  if priority ~= nil
    and not (type(priority) == 'number' and is_whole(math.abs(priority), RULES.MAX_PRIORITY)) then
    return default_config('priority: expected a whole number')
  end
  if fallback ~= nil then
    if not is_list(fallback, document) then return default_config('fallback: expected a list') end
    if #fallback > RULES.MAX_STEPS then return default_config('fallback: more than ' .. RULES.MAX_STEPS .. ' steps') end
    for _, step in ipairs(fallback) do
      if not is_step(step) then return default_config('fallback: expected names') end
    end
  end
  local steps = {}
  if pool then steps[1] = 'merchant:' .. pool end
  if not only then
    for _, step in ipairs(fallback or {}) do steps[#steps + 1] = step end
  end
  return {steps = steps, has_default_chain = not only and #(fallback or {}) == 0, max_calls = max_calls,
    max_rate = max_rate, priority = priority or 0, malformed = ''}
end)

local TOO_LONG = default_config('longer than ' .. RULES.MAX_DOCUMENT .. ' bytes')
local function merchant_config_of(document)
  -- Documents under a key of another type are malformed: the call takes the default chain.
  if type(document) == 'table' then return default_config(K.merchant_config .. ': ' .. document.err) end
  return #document > RULES.MAX_DOCUMENT and TOO_LONG or parse_config(document)
end

-- Parses the default chain: its steps {step, tier, kind}, the kinds by tier, the merchant pools whose calls prefer low
-- ordinals, and the number of its first steps from which draw_usual_pod can draw.
local parse_chain = memoized(function(chain)
  local steps, kinds, usual_steps = {}, {}, 0
  for name, kind, cap, strategy in string.gmatch(chain, '(%S+)=(%a+):(%d+):(%a+)') do
    kinds[name] = {kind = kind, cap = tonumber(cap), strategy = strategy, is_shared = kind == 'shared'}
    if usual_steps == #steps and strategy == 'spread' and cap ~= '0' then usual_steps = usual_steps + 1 end
    steps[#steps + 1] = {step = name, tier = name, kind = kinds[name]}
  end
  return {steps = steps, kinds = kinds, ordered = parse_ordered(chain), usual_steps = usual_steps}
end)

-- Draws the pod of a new call in the usual case: the merchant has no document, and the first pool of the default chain
-- with an available pod has a plain one; the call has neither a record nor a history, and no slots are held for dials.
-- Returns the pod and the steps skipped before it; nil where any of this is not so: the general case decides then.
local function draw_usual_pod(call, merchant, numbers)
  local chain = run_protected('HGET', K.tiers, ':chain')
  if type(chain) ~= 'string' or merchant ~= '' and run_protected('HGET', K.merchant_config, merchant) then
    return nil
  end
  local parsed = parse_chain(chain)
  local steps, tried, tier, kind, pod_name = parsed.steps, '', nil, nil, nil
  for i = 1, parsed.usual_steps do
    tier, kind = steps[i].tier, steps[i].kind
    local keys = pool_keys_of(tier)
    if kind.is_shared then
      -- The least loaded pod.
      pod_name = run_protected('ZRANGE', keys.available, '0', '0')[1]
    else
      pod_name = run_protected('SRANDMEMBER', keys.available)
    end
    if pod_name then break end
    if run_protected('EXISTS', keys.at_risk, K.audit_due) ~= 0 then return nil end
    tried = (tried == '' and '' or tried .. ' ') .. tier .. '=' .. reason_of(keys)
  end
  if type(pod_name) ~= 'string' then return nil end
  local key, calls_key = K.pod .. pod_name, K.pod_calls .. pod_name
  local calls = kind.is_shared and run_protected('ZCARD', calls_key) or 0
  if run_protected('HGET', key, 'plain') ~= tier or calls ~= 0 and (type(calls) ~= 'number' or calls >= kind.cap)
    or run_protected('EXISTS', calls == 0 and calls_key or K.reservations, K.pod_draining .. pod_name,
    K.call .. call, K.call_end .. call, K.reservations, numbers and K.numbers or K.reservations) ~= 0 then
    return nil
  end
  chain_kinds, ordered_merchants = parsed.kinds, parsed.ordered
  return {name = pod_name, key = key, calls_key = calls_key, tier = tier, calls = calls, is_plain = true,
    has_no_lease = false}, tried
end

-- Returns the chain steps of a call; tier and kind of an unknown step are nil.
local function steps_of(config, parsed)
  local default = NONE
  if config.has_default_chain then
    default, chain_kinds = parsed.steps, parsed.kinds
    if #config.steps == 0 then return default end
  end
  local steps = {}
  for _, step in ipairs(config.steps) do
    local tier = step
    if not merchant_of(step) then
      local entry = tier_entry(step)
      tier = entry and (entry.kind == 'dedicated' and 'merchant:' .. step or step)
    end
    steps[#steps + 1] = {step = step, tier = tier, kind = tier and kind_of(tier)}
  end
  for _, step in ipairs(default) do steps[#steps + 1] = step end
  return steps
end

-- Returns the chain steps of a merchant's calls, its configuration and its document; nil without a usable tier table,
-- which the recovery rewrites.
local function chain_of(merchant)
  local chain, dials, numbers, waiting = unpack(try('HMGET', K.tiers, ':chain', ':dials', ':numbers', ':waiting'))
  if type(chain) ~= 'string' then return nil end
  has_dials, has_numbers = dials and true or false, numbers and true or false
  has_waiting_calls = waiting and true or false
  local parsed = parse_chain(chain)
  ordered_merchants = parsed.ordered
  local document = merchant ~= '' and try('HGET', K.merchant_config, merchant)
  local config = document and merchant_config_of(document) or DEFAULT_CONFIG
  return steps_of(config, parsed), config, document
end
