-- Puts a tier table in force. Deletes at once the indexes of pools that no longer exist or whose kind has changed; the
-- audit places the pods.
-- ARGV[2..6]: actor, tier document ('' to keep the current one), chain, stage, precondition ('' for none; '=' and the
--   expected table: chain and entries, sorted, one per line; '@' and the expected tier document); then pairs of a tier
--   and its entry
--   stage: '' in a store that is set up; 'adopting' before the adoption: without the chain, so that other functions
--   still find the store not set up; 'adopted' after it
-- Replies: {applied, now}   {unchanged, now}   {changed, now}: the precondition does not hold
--          {lost, now}: the store is not set up
local FIRST_TIER = 7

operation('apply_tiers', function(ARGV)
  local _, by, document, chain, stage, precondition = unpack(ARGV, 1, 6)
  if stage == '' and not is_set_up() then return {'lost', now} end
  local new_entries = {}
  for i = FIRST_TIER, #ARGV, 2 do new_entries[ARGV[i]] = ARGV[i + 1] end
  -- A table of the wrong type is replaced: it is derived from the document and the settings.
  local fields = try('HGETALL', K.tiers)
  if fields.err then fields = {} end
  local is_same, trusting, waiting = true, nil, nil
  local current, lines = {}, {}
  for i = 1, #fields, 2 do
    local name, value = fields[i], fields[i + 1]
    if name == ':trusting_until' then
      trusting = value
    elseif name == ':waiting' then
      waiting = true
    elseif name == ':chain' then
      is_same = is_same and value == chain
      current[name] = true
      lines[#lines + 1] = value
    else
      current[name] = value
      lines[#lines + 1] = name .. ' ' .. value
      is_same = is_same and new_entries[name] == value
    end
  end
  for name in pairs(new_entries) do is_same = is_same and current[name] ~= nil end
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
    if name ~= ':chain' then
      local old_kind = (parse_entry(text) or {}).kind
      local new_kind = new_entries[name] and parse_entry(new_entries[name]).kind
      if old_kind ~= new_kind then
        run('DEL', K.pool .. name .. ':available')
      end
    end
  end
  run('DEL', K.tiers)
  if stage ~= 'adopting' then run('HSET', K.tiers, ':chain', chain) end
  if stage == 'adopted' then run('SET', K.schema, SCHEMA) end
  if trusting then run('HSET', K.tiers, ':trusting_until', trusting) end
  if waiting or count('ZCARD', K.waiting) > 0 then run('HSET', K.tiers, ':waiting', '1') end
  for name, text in pairs(new_entries) do run('HSET', K.tiers, name, text) end
  if stage == '' then record_event('tiers', '', '', '', '', by) end
  return {'applied', now}
end)
