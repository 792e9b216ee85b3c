-- Grants as many reservations as the limits allow. All checks precede the first write. The same ids again are a repeat
-- of the same request.
-- ARGV[2..6]: merchant, number ('' for none), lifetime (ms), miss target (millionths), accounts whose rate limit may
--   apply (separated by spaces); then the ids
-- Replies: {reserved, now, deadline, limit that refuses the others ('' for none), time to wait (ms), error in the
--            merchant's document, {ids}}
--          {lost, now}: the store is empty   {late, now}
local FIRST_ID = 7

-- Returns the reply to a repeated request; nil for a new one.
local function repeated_reply(ids, malformed)
  local keys, granted, ends = {}, {}, 0
  for i, id in ipairs(ids) do keys[i] = K.reservation .. id end
  for i, text in ipairs(run('MGET', unpack(keys))) do
    local facts = outbound.parse(ids[i], text)
    if facts then
      granted[#granted + 1] = ids[i]
      ends = facts.ends
    end
  end
  return #granted > 0 and {'reserved', now, text_of(ends), '', 0, malformed, granted} or nil
end

-- Returns a limit; nil without one. A malformed limit allows no dial.
local function limit_of(key, field)
  local limit = read('HGET', key, field)
  return limit and (tonumber(string.match(limit, '^%d+$')) or 0) or nil
end

-- Returns how many more lines of the number are free; nil without a limit.
local function lines_room(number, wanted)
  local limit = number ~= '' and has_numbers and limit_of(K.numbers, number)
  if not limit then return nil end
  local key = K.lines .. number
  local room = max(0, limit - count('SCARD', key))
  if room >= wanted then return room end
  -- Holders whose records were deleted by hand, or have expired, use no line.
  local holders = try('SRANDMEMBER', key, text_of(RULES.MAX_CHECKED))
  for _, holder in ipairs(holders.err and {} or holders) do
    if not outbound.uses_line(number, holder) then run('SREM', key, holder) end
  end
  return max(0, limit - count('SCARD', key))
end

-- Returns the account whose rate limit counts, how many dials it allows now (nil without a limit), and the time until
-- it allows the next one.
local function dial_rate_room(accounts)
  for account in string.gmatch(accounts, '%S+') do
    local limit = limit_of(K.accounts, account)
    if limit == 0 then return account, 0, RULES.DIAL_RETRY end
    if limit then
      -- Evenly spaced, so that no second has more than the limit.
      local interval = math.ceil(1000 / limit)
      local last = try('HGET', K.last_dials, account)
      last = type(last) == 'string' and tonumber(last) or 0
      if last > now then
        -- The clock was set back since.
        last = now
        run_index('HSET', K.last_dials, account, text_of(now))
      end
      if now < last + interval then return account, 0, last + interval - now end
      return account, 1, interval
    end
  end
  return '', nil, 0
end

-- Returns the answer probability of further dials in a pool.
local function probability_of(rate, dials, number)
  return ARITHMETIC.answer_probability(rate.dials, rate.answers, dials.dials + number)
end

-- Returns how many further dials of a merchant a pool can hold within `room` slots, at most `wanted`.
local function fitting_dials(dials, rate, wanted, room, target)
  local function fits(number)
    return outbound.held(outbound.add(dials, number, probability_of(rate, dials, number)), target) <= room
  end
  if fits(wanted) then return wanted end
  local fitting, excess = 0, wanted
  while excess - fitting > 1 do
    local middle = floor((fitting + excess) / 2)
    if fits(middle) then fitting = middle else excess = middle end
  end
  return fitting
end

-- Returns the slots of a pool that are kept for inbound calls.
local function reserved_slots(tier, kind, bounds)
  local text = type(bounds) == 'string' and string.match(bounds, ' (%S+)$') or '0'
  local percent = string.match(text, '^(%d+)%%$')
  if not percent then return tonumber(text) or 0 end
  local keys = pool_keys_of(tier)
  local in_service = max(0, count('SCARD', keys.assigned) - count('ZCARD', keys.out))
  return math.ceil(in_service * (kind.kind == 'shared' and kind.cap or 1) * tonumber(percent) / 100)
end

-- Distributes dials over the pools of the chain. Returns {tier, number, dials, probability} of each, how many found no
-- room, and the limit that refuses these.
local function fill_pools(steps, wanted, rate, target, known)
  local plan, left, limit, is_planned = {}, wanted, 'capacity', {}
  for _, step in ipairs(steps) do
    local tier, kind = step.tier, step.kind
    if left == 0 then break end
    -- Waiting callers precede diallers.
    if kind and not is_planned[tier] and not (has_waiting_calls and count('ZCARD', pool_keys_of(tier).queue) > 0) then
      local dials = outbound.parse_dials(known[tier])
      local reserve = reserved_slots(tier, kind, try('HGET', K.tier_bounds, merchant_of(tier) or tier))
      local slots = outbound.counted_slots(tier, kind, dials.dials + left + reserve)
      local number = slots >= reserve and fitting_dials(dials, rate, left, slots - reserve, target) or 0
      if number < left and reserve > 0 and fitting_dials(dials, rate, left, slots, target) > number then
        limit = 'inbound_reserve'
      end
      if number > 0 then
        left, is_planned[tier] = left - number, true
        plan[#plan + 1] = {tier = tier, number = number, dials = dials,
          probability = probability_of(rate, dials, number)}
      end
    end
  end
  return plan, left, limit
end

-- Returns the dials of the pools of a chain by tier, and the target with which their held slots were computed.
local function known_dials(steps)
  local fields, known = {':target'}, {}
  for _, step in ipairs(steps) do
    if step.kind then fields[#fields + 1] = step.tier end
  end
  local values = try('HMGET', K.dials, unpack(fields))
  for i, tier in ipairs(fields) do known[tier] = not values.err and values[i] or nil end
  return known, tonumber(known[':target'] or '')
end

-- Computes the held slots of all pools with another target.
local function change_target(target)
  local fields = run_index('HGETALL', K.dials)
  for i = 1, #fields, 2 do
    if fields[i] ~= ':target' then outbound.set_dials(fields[i], outbound.parse_dials(fields[i + 1]), target) end
  end
  run_index('HSET', K.dials, ':target', text_of(target))
end

-- Writes the reservations of a plan. Returns their ids.
local function grant(plan, ids, facts, target)
  local granted, deadlines = {}, {}
  for _, part in ipairs(plan) do
    facts.tier, facts.probability = part.tier, part.probability
    for _ = 1, part.number do
      facts.id = ids[#granted + 1]
      granted[#granted + 1] = facts.id
      deadlines[#deadlines + 1] = text_of(facts.ends)
      deadlines[#deadlines + 1] = facts.id
      outbound.set(facts)
      outbound.take_line(facts.number, facts.id)
      record_event('reserved', '', '', pool_keys_of(part.tier).source, facts.merchant,
        facts.id .. (facts.number ~= '' and ' ' .. facts.number or ''))
    end
    outbound.set_dials(part.tier, outbound.add(part.dials, part.number, part.probability), target)
  end
  run_index('ZADD', K.reservations, unpack(deadlines))
  run_index('ZADD', dials_key(facts.merchant), unpack(deadlines))
  if facts.account ~= '' then run_index('HSET', K.last_dials, facts.account, text_of(now)) end
  if not has_dials then run('HSET', K.tiers, ':dials', '1') end
  return granted
end

operation('reserve', function(ARGV)
  local _, merchant, number, lifetime, target, accounts = unpack(ARGV, 1, 6)
  local ids = {unpack(ARGV, FIRST_ID)}
  target = tonumber(target)
  local steps, config = chain_of(merchant)
  if not steps then return {'lost', now} end
  local repeated = repeated_reply(ids, config.malformed)
  if repeated then return repeated end
  local account, dial_room, dial_wait = dial_rate_room(accounts)
  local allowed, limit = #ids, ''
  local function bound(room, name)
    if room and room < allowed then allowed, limit = room, name end
  end
  bound(config.max_calls and outbound.calls_room(merchant, config.max_calls, #ids), 'max_calls')
  bound(lines_room(number, #ids), 'max_lines')
  bound(dial_room, 'max_cps')
  local ends = now + tonumber(lifetime)
  local facts = {ends = ends, at = now, merchant = merchant, number = number, account = account, call = ''}
  local rate = {}
  rate.dials, rate.answers = outbound.answer_rate(merchant)
  local known, known_target = known_dials(steps)
  local plan, left, pod_limit = fill_pools(steps, allowed, rate, target, known)
  local wait = limit == '' and 0 or limit == 'max_cps' and dial_wait or RULES.DIAL_RETRY
  if left > 0 then limit, wait = pod_limit, RULES.DIAL_RETRY end
  if #plan == 0 then return {'reserved', now, text_of(ends), limit, wait, config.malformed, {}} end
  if known_target ~= target then change_target(target) end
  local granted = grant(plan, ids, facts, target)
  return {'reserved', now, text_of(ends), limit, wait, config.malformed, granted}
end)
