-- Puts another tier table in force. The views of pools whose kind has changed, or
-- that are no more, go at once; the pods are placed again by the audit.
-- ARGV[2..6]: who asks, tier document ('' to leave the one there is), chain, stage, what it depends on ('' for nothing,
--   '=' and the table that it replaces: chain and entries, sorted, one a line, '@' and the tier document there is); then a
--   tier and its entry, again and again
--   stage: '' in a store that is set up; 'adopting' before what the older router left is taken over: without the
--   chain, by which other scripts know that they may work; 'adopted' after it
-- Replies: {applied, now}   {unchanged, now}   {changed, now}: it is another already   {lost, now}: the store is not set up
operation('apply_tiers', function(ARGV)
  local by, stage, depends_on = ARGV[2], ARGV[5], ARGV[6]
  if stage == '' and not is_set_up() then return {'lost', now} end
  local fresh = {}
  for i = 7, #ARGV, 2 do fresh[ARGV[i]] = ARGV[i + 1] end
  -- A table of the wrong type is replaced: the document and the settings say what it was.
  local fields = try('HGETALL', K.tiers)
  if fields.err then fields = {} end
  local same, trusting, waiting = true, nil, nil
  local before, lines = {}, {}
  for i = 1, #fields, 2 do
    if fields[i] == ':trusting_until' then
      trusting = fields[i + 1]
    elseif fields[i] == ':waiting' then
      waiting = true
    elseif fields[i] == ':chain' then
      same = same and fields[i + 1] == ARGV[4]
      before[fields[i]] = true
      lines[#lines + 1] = fields[i + 1]
    else
      before[fields[i]] = fields[i + 1]
      lines[#lines + 1] = fields[i] .. ' ' .. fields[i + 1]
      same = same and fresh[fields[i]] == fields[i + 1]
    end
  end
  for name in pairs(fresh) do same = same and before[name] ~= nil end
  local is_same = stage == '' and same and before[':chain']
  if depends_on ~= '' and not is_same then
    local is
    if string.sub(depends_on, 1, 1) == '@' then
      local document = try('GET', K.tier_config)
      is = '@' .. (type(document) == 'string' and document or '')
    else
      table.sort(lines)
      is = '=' .. table.concat(lines, '\n')
    end
    if is ~= depends_on then return {'changed', now} end
  end
  if ARGV[3] ~= '' then run('SET', K.tier_config, ARGV[3]) end
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
  if stage ~= 'adopting' then run('HSET', K.tiers, ':chain', ARGV[4]) end
  if stage == 'adopted' then run('SET', K.schema, '1') end
  if trusting then run('HSET', K.tiers, ':trusting_until', trusting) end
  if waiting or count('ZCARD', K.waiting) > 0 then run('HSET', K.tiers, ':waiting', '1') end
  for name, text in pairs(fresh) do run('HSET', K.tiers, name, text) end
  if stage == '' then tell('tiers', '', '', '', '', by) end
  return {'applied', now}
end)
