-- Derives the sums of the dials of each pool, its held slots and the flags of the tier table from the reservations.
-- Beyond MAX_AUDITED reservations the sums are left as they are: the function would take too long.
-- Replies: {audited, now, '', reservations seen, {pools repaired}}   {lost, now}: the store is not set up
local MAX_AUDITED, CHUNK = 10000, 500

-- Returns the sums by tier.
local function sums_of(ids)
  local sums = {}
  for first = 1, #ids, CHUNK do
    local keys = {}
    for i = first, math.min(first + CHUNK - 1, #ids) do keys[#keys + 1] = K.reservation .. ids[i] end
    for _, text in ipairs(run('MGET', unpack(keys))) do
      local facts = outbound.parse('', text)
      if facts then
        sums[facts.tier] = outbound.add(sums[facts.tier] or outbound.parse_dials(''), 1, facts.probability)
      end
    end
  end
  return sums
end

-- Sets or deletes a flag of the tier table.
local function set_flag(name, is_set)
  if is_set then run('HSET', K.tiers, name, '1') else run('HDEL', K.tiers, name) end
end

operation('audit_dials', function(ARGV)
  if not is_set_up() then return {'lost', now} end
  local repaired = {}
  local ids = run_index('ZRANGE', K.reservations, 0, MAX_AUDITED)
  set_flag(':dials', #ids > 0)
  -- Limits of a wrong type are still looked up: the dialler gets an error that names the key.
  set_flag(':numbers', try('HLEN', K.numbers) ~= 0)
  if #ids > MAX_AUDITED then return {'audited', now, '', #ids, repaired} end
  local sums, fields = sums_of(ids), run_index('HGETALL', K.dials)
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
  return {'audited', now, '', #ids, repaired}
end)
