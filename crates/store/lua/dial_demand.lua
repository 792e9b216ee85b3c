-- Returns the demand of dials by pool: outstanding ones, and those that wait at all routers.
-- Replies: {demand, now, {tier, waiting dials, sum of their answer probabilities (1/1024), ...},
--   {dials: tier, held dials probability variance, ...}}   {lost, now}: the store is empty

-- Returns the waiting dials of the reports in force, by merchant and number ('-' for none). A malformed report, edited
-- by hand, counts as none.
local function waiting_dials()
  local fields, merchants = try('HGETALL', K.waiting_dials), {}
  for i = 2, fields.err and 0 or #fields, 2 do
    local ends, entries = string.match(fields[i], '^(%d+)(.*)$')
    if ends and outbound.is_in_force(tonumber(ends)) then
      for merchant, number, dials in string.gmatch(entries, ' (%S+) (%S+) (%d+)') do
        local numbers = merchants[merchant] or {}
        merchants[merchant] = numbers
        numbers[number] = (numbers[number] or 0) + math.min(tonumber(dials), RULES.MAX_WAITING_DIALS)
      end
    end
  end
  return merchants
end

-- Returns the first pool of a chain that is in the tier table or has pods; nil if there is none.
local function first_pool(steps)
  for _, step in ipairs(steps) do
    if step.kind and (is_defined(step.tier) or count('SCARD', pool_keys_of(step.tier).assigned) > 0) then
      return step.tier
    end
  end
end

-- Returns how many dials the lines of a number allow.
local function within_lines(number, dials)
  local limit = number ~= '-' and has_numbers and try('HGET', K.numbers, number)
  if type(limit) ~= 'string' then return dials end
  -- A malformed limit allows no dial.
  limit = tonumber(string.match(limit, '^%d+$')) or 0
  return math.min(dials, max(0, limit - count('SCARD', K.lines .. number)))
end

operation('dial_demand', function(ARGV)
  if not has_tiers() then return {'lost', now} end
  local demand, rows = {}, {}
  for merchant, numbers in pairs(waiting_dials()) do
    local steps, config = chain_of(merchant)
    local tier = steps and first_pool(steps)
    if tier then
      local waiting = 0
      for number, dials in pairs(numbers) do waiting = waiting + within_lines(number, dials) end
      if config.max_calls then
        waiting = math.min(waiting, outbound.calls_room(merchant, config.max_calls, 0))
      end
      local dials, answers = outbound.answer_rate(merchant)
      local sums = demand[tier] or {dials = 0, probability = 0}
      demand[tier] = sums
      sums.dials = sums.dials + waiting
      sums.probability = sums.probability + waiting * ARITHMETIC.answer_probability(dials, answers, 0)
    end
  end
  for tier, sums in pairs(demand) do
    for _, value in ipairs({tier, text_of(sums.dials), text_of(sums.probability)}) do rows[#rows + 1] = value end
  end
  local dials = try('HGETALL', K.dials)
  return {'demand', now, rows, dials.err and {} or dials}
end)
