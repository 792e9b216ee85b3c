-- merchant: what a merchant's document asks for.

local function is_name(text)
  return type(text) == 'string' and #text >= 1 and #text <= 64
    and not string.find(text, '[^%w._-]') and text ~= '.' and text ~= '..'
end

local function is_step(text)
  return is_name(text) or type(text) == 'string' and is_name(merchant_of(text))
end

local function is_whole(value, most)
  return type(value) == 'number' and value >= 0 and value <= most and value % 1 == 0
end

local function is_list(value, document)
  if type(value) ~= 'table' then return false end
  if #value > 0 then return true end
  -- Once decoded, an object is a table, too, and an empty one looks like a list.
  return next(value) == nil and not string.find(document, '"fallback"%s*:%s*{')
end

-- Of a document that says nothing, or nothing that can be used: the default chain.
local function nothing(wrong)
  return {steps = {}, goes_on = true, priority = 0, wrong = wrong or ''}
end
local NO_WISHES = nothing()

-- A document as it is meant: the steps of its chain, whether the default chain goes on
-- from there, how many calls it may have and start each second (nil for any), whose
-- calls come first where they have to wait, what is wrong with it.
local read_wishes = remembered(function(document)
  if not string.find(document, '^%s*{') then return nothing('not a JSON object') end
  -- JSON has no NaN and no hexadecimal numbers; cjson has, unless told otherwise.
  cjson.decode_invalid_numbers(false)
  local ok, fields = pcall(cjson.decode, document)
  cjson.decode_invalid_numbers(true)
  if not ok then return nothing('not JSON') end
  local function given(name)
    local value = fields[name]
    if value == cjson.null then return nil end
    return value
  end
  local pool, fallback, only = given('pool'), given('fallback'), given('dedicated_only')
  local max_calls, max_rate, priority = given('max_calls'), given('max_rate'), given('priority')
  if pool == '' then pool = nil end
  if pool ~= nil and not is_name(pool) then return nothing('pool: expected a name') end
  if only ~= nil and type(only) ~= 'boolean' then return nothing('dedicated_only: expected true or false') end
  if max_calls ~= nil and not is_whole(max_calls, RULES.MAX_MERCHANT_CALLS) then
    return nothing('max_calls: expected a whole number')
  end
  if max_rate ~= nil and not is_whole(max_rate, RULES.MAX_MERCHANT_RATE) then
    return nothing('max_rate: expected a whole number')
  end
  if priority ~= nil
    and not (type(priority) == 'number' and is_whole(math.abs(priority), RULES.MAX_PRIORITY)) then
    return nothing('priority: expected a whole number')
  end
  if fallback ~= nil then
    if not is_list(fallback, document) then return nothing('fallback: expected a list') end
    if #fallback > RULES.MAX_STEPS then return nothing('fallback: more than ' .. RULES.MAX_STEPS .. ' steps') end
    for _, step in ipairs(fallback) do
      if not is_step(step) then return nothing('fallback: expected names') end
    end
  end
  local steps = {}
  if pool then steps[1] = 'merchant:' .. pool end
  if not only then
    for _, step in ipairs(fallback or {}) do steps[#steps + 1] = step end
  end
  return {steps = steps, goes_on = not only and #(fallback or {}) == 0, max_calls = max_calls, max_rate = max_rate,
    priority = priority or 0, wrong = ''}
end)

local TOO_LONG = nothing('longer than ' .. RULES.MAX_DOCUMENT .. ' bytes')
local function wishes_of(document)
  -- Documents that can't be read are malformed: the call has the default chain.
  if type(document) == 'table' then return nothing(K.merchant_config .. ': ' .. document.err) end
  return #document > RULES.MAX_DOCUMENT and TOO_LONG or read_wishes(document)
end

-- The steps of the default chain: {step, tier, kind}; and the kinds by tier.
local default_steps = remembered(function(chain)
  local steps, kinds = {}, {}
  for name, kind, cap, strategy in string.gmatch(chain, '(%S+)=(%a+):(%d+):(%a+)') do
    kinds[name] = {kind = kind, cap = tonumber(cap), strategy = strategy}
    steps[#steps + 1] = {step = name, tier = name, kind = kinds[name]}
  end
  return {steps = steps, kinds = kinds}
end)

-- The steps that a call takes; tier and kind are nil where they are unknown.
local function steps_of(wishes, chain)
  local default = NONE
  if wishes.goes_on then
    local parsed = default_steps(chain)
    default, chain_kinds = parsed.steps, parsed.kinds
    if #wishes.steps == 0 then return default end
  end
  local steps = {}
  for _, step in ipairs(wishes.steps) do
    local tier = step
    if not merchant_of(step) then
      local found = entry(step)
      tier = found and (found.kind == 'dedicated' and 'merchant:' .. step or step)
    end
    steps[#steps + 1] = {step = step, tier = tier, kind = tier and kind_of(tier)}
  end
  for _, step in ipairs(default) do steps[#steps + 1] = step end
  return steps
end
