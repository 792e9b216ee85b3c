-- Derives the indexes of reservations again: their lines, the calls of their merchants, the sums of the dials of each
-- pool. Removes lines of calls and reservations that are over. Beyond MAX_AUDITED reservations the sums are left as
-- they are: the function would take too long.
-- Replies: {audited, now, '', reservations seen, {what was repaired}}   {lost, now}: the store is not set up
local MAX_AUDITED = 10000

-- Removes holders of lines that are over, of the numbers with a limit.
local function audit_lines(repaired)
  local numbers = run_index('HKEYS', K.numbers)
  for _, number in ipairs(numbers) do
    local key = K.lines .. number
    for _, holder in ipairs(run_index('SRANDMEMBER', key, '1000')) do
      if not outbound.uses_line(number, holder) then
        run('SREM', key, holder)
        repaired[#repaired + 1] = key .. ' ' .. holder
      end
    end
  end
  if #numbers > 0 then run('HSET', K.tiers, ':numbers', '1') else run('HDEL', K.tiers, ':numbers') end
end

-- Restores the indexes of one reservation. Returns whether one was wrong.
local function audit_reservation(facts)
  local is_wrong = outbound.take_line(facts.number, facts.id)
  local added = run_index('ZADD', live_key(facts.merchant), text_of(facts.ends), facts.id)
  return added > 0 or is_wrong
end

operation('audit_outbound', function(ARGV)
  if not is_set_up() then return {'lost', now} end
  local repaired, sums = {}, {}
  audit_lines(repaired)
  local ids = run_index('ZRANGE', K.reservations, 0, MAX_AUDITED)
  for _, id in ipairs(ids) do
    local facts = outbound.get(id)
    if not facts then
      run('ZREM', K.reservations, id)
      repaired[#repaired + 1] = id
    else
      sums[facts.tier] = outbound.add(sums[facts.tier] or outbound.parse_dials(''), 1, facts.probability)
      if audit_reservation(facts) then repaired[#repaired + 1] = id end
    end
  end
  if #ids > MAX_AUDITED then return {'audited', now, '', #ids, repaired} end
  local fields = run_index('HGETALL', K.dials)
  local target, known = 0, {}
  for i = 1, #fields, 2 do
    if fields[i] == ':target' then target = tonumber(fields[i + 1]) or 0 else known[fields[i]] = fields[i + 1] end
  end
  for tier, dials in pairs(sums) do
    local before = outbound.parse_dials(known[tier])
    if before.dials ~= dials.dials or before.probability ~= dials.probability or before.variance ~= dials.variance
      or before.held ~= outbound.held(dials, target) then
      outbound.set_dials(tier, dials, target)
      repaired[#repaired + 1] = K.dials .. ' ' .. tier
    end
  end
  for tier in pairs(known) do
    if not sums[tier] then
      run('HDEL', K.dials, tier)
      repaired[#repaired + 1] = K.dials .. ' ' .. tier
    end
  end
  if #ids > 0 then run('HSET', K.tiers, ':dials', '1') end
  return {'audited', now, '', #ids, repaired}
end)
