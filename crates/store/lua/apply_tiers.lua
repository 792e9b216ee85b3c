-- Puts a tier table in force. Deletes at once the indexes of pools that no longer exist or whose kind has changed; the
-- audit places the pods.
-- ARGV[2..6]: actor, tier document ('' to keep the current one), chain, stage, precondition ('' for none; '=' and the
--   expected table: chain, and tiers with entry and bounds, sorted, one per line; '@' and the expected tier document);
--   then each tier with its entry and its bounds ('' for the defaults), and ':workloads' with the
--   workloads of tiers and ':managed_by' with the objects of the cluster that manage the table, if any
--   stage: '' in a store that is set up; 'adopting' before the adoption: without the chain, so that other functions
--   still find the store not set up; 'adopted' after it
-- Replies: {applied, now}   {unchanged, now}   {changed, now}: the precondition does not hold
--          {lost, now}: the store is not set up
local FIRST_TIER = 7

-- Returns the bounds of tiers, by tier. A key of the wrong type has none: it is derived like the table.
local function current_bounds()
  local fields, bounds = try('HGETALL', K.tier_bounds), {}
  if fields.err then return bounds end
  for i = 1, #fields, 2 do bounds[fields[i]] = fields[i + 1] end
  return bounds
end

operation('apply_tiers', function(ARGV)
  local _, by, document, chain, stage, precondition = unpack(ARGV, 1, 6)
  if stage == '' and not is_set_up() then return {'lost', now} end
  local new_entries, new_bounds = {}, {}
  for i = FIRST_TIER, #ARGV, 3 do
    new_entries[ARGV[i]] = ARGV[i + 1]
    if ARGV[i + 2] ~= '' then new_bounds[ARGV[i]] = ARGV[i + 2] end
  end
  -- A table of the wrong type is replaced: it is derived from the document and the settings.
  local fields = try('HGETALL', K.tiers)
  if fields.err then fields = {} end
  local bounds, is_same = current_bounds(), true
  local trusting, waiting, flags = nil, nil, {}
  local current, lines = {}, {}
  for i = 1, #fields, 2 do
    local name, value = fields[i], fields[i + 1]
    if name == ':trusting_until' then
      trusting = value
    elseif name == ':waiting' then
      waiting = true
    elseif name == ':dials' or name == ':numbers' then
      flags[#flags + 1] = name
    elseif name == ':chain' then
      is_same = is_same and value == chain
      current[name] = true
      lines[#lines + 1] = value
    else
      current[name] = value
      lines[#lines + 1] = name .. ' ' .. value .. ' ' .. (bounds[name] or '')
      is_same = is_same and new_entries[name] == value
    end
  end
  for name in pairs(new_entries) do is_same = is_same and current[name] ~= nil end
  for name, text in pairs(new_bounds) do is_same = is_same and bounds[name] == text end
  for name in pairs(bounds) do is_same = is_same and new_bounds[name] ~= nil end
  local is_in_force = stage == '' and is_same and current[':chain']
  if precondition ~= '' and not is_in_force then
    local actual
    if string.sub(precondition, 1, 1) == '@' then
      local text = try('GET', K.tier_config)
      actual = '@' .. (type(text) == 'string' and text or '')
    else
      table.sort(lines)
      actual = '=' .. table.concat(lines, '\n')
    end
    if actual ~= precondition then return {'changed', now} end
  end
  if document ~= '' then run('SET', K.tier_config, document) end
  if is_in_force then return {'unchanged', now} end
  for name, text in pairs(current) do
    if string.sub(name, 1, 1) ~= ':' then
      local old_kind = (parse_entry(text) or {}).kind
      local new_kind = new_entries[name] and parse_entry(new_entries[name]).kind
      if old_kind ~= new_kind then
        run('DEL', pool_keys_of(name).available, pool_keys_of(name).at_risk)
      end
    end
  end
  run('DEL', K.tiers, K.tier_bounds)
  if stage ~= 'adopting' then run('HSET', K.tiers, ':chain', chain) end
  if stage == 'adopted' then run('SET', K.schema, SCHEMA) end
  if trusting then run('HSET', K.tiers, ':trusting_until', trusting) end
  if waiting or count('ZCARD', K.waiting) > 0 then run('HSET', K.tiers, ':waiting', '1') end
  for _, name in ipairs(flags) do run('HSET', K.tiers, name, '1') end
  for name, text in pairs(new_entries) do run('HSET', K.tiers, name, text) end
  for name, text in pairs(new_bounds) do run('HSET', K.tier_bounds, name, text) end
  if stage == '' then record_event('tiers', '', '', '', '', by) end
  return {'applied', now}
end)
