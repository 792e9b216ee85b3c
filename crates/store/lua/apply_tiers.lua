-- Puts another tier table in force. The views of pools whose kind has changed, or
-- that are no more, go at once; the pods are placed again by the audit.
-- ARGV[2..6]: actor, tier document ('' to leave the one there is), chain, stage, precondition ('' for none, '=' and
--   the table that it replaces: chain and entries, sorted, one a line, '@' and the tier document there is); then pairs
--   of a tier and its entry
--   stage: '' in a store that is set up; 'adopting' before what the older router left is taken over: without the
--   chain, by which other scripts know that they may work; 'adopted' after it
-- Replies: {applied, now}   {unchanged, now}   {changed, now}: it is another already
--          {lost, now}: the store is not set up
local FIRST_TIER = 7

operation('apply_tiers', function(ARGV)
  local _, by, document, chain, stage, depends_on = unpack(ARGV, 1, 6)
  if stage == '' and not is_set_up() then return {'lost', now} end
  local fresh = {}
  for i = FIRST_TIER, #ARGV, 2 do fresh[ARGV[i]] = ARGV[i + 1] end
  -- A table of the wrong type is replaced: the document and the settings say what it was.
  local fields = try('HGETALL', K.tiers)
  if fields.err then fields = {} end
  local same, trusting, waiting = true, nil, nil
  local before, lines = {}, {}
  for i = 1, #fields, 2 do
    local name, value = fields[i], fields[i + 1]
    if name == ':trusting_until' then
      trusting = value
    elseif name == ':waiting' then
      waiting = true
    elseif name == ':chain' then
      same = same and value == chain
      before[name] = true
      lines[#lines + 1] = value
    else
      before[name] = value
      lines[#lines + 1] = name .. ' ' .. value
      same = same and fresh[name] == value
    end
  end
  for name in pairs(fresh) do same = same and before[name] ~= nil end
  local is_same = stage == '' and same and before[':chain']
  if depends_on ~= '' and not is_same then
    local is
    if string.sub(depends_on, 1, 1) == '@' then
      local current = try('GET', K.tier_config)
      is = '@' .. (type(current) == 'string' and current or '')
    else
      table.sort(lines)
      is = '=' .. table.concat(lines, '\n')
    end
    if is ~= depends_on then return {'changed', now} end
  end
  if document ~= '' then run('SET', K.tier_config, document) end
  if is_same then return {'unchanged', now} end
  for name, text in pairs(before) do
    if name ~= ':chain' then
      local was = (parse_entry(text) or {}).kind
      local is = fresh[name] and parse_entry(fresh[name]).kind
      if was ~= is then
        run('DEL', K.pool .. name .. ':available')
      end
    end
  end
  run('DEL', K.tiers)
  if stage ~= 'adopting' then run('HSET', K.tiers, ':chain', chain) end
  if stage == 'adopted' then run('SET', K.schema, '1') end
  if trusting then run('HSET', K.tiers, ':trusting_until', trusting) end
  if waiting or count('ZCARD', K.waiting) > 0 then run('HSET', K.tiers, ':waiting', '1') end
  for name, text in pairs(fresh) do run('HSET', K.tiers, name, text) end
  if stage == '' then tell('tiers', '', '', '', '', by) end
  return {'applied', now}
end)
