-- Adds or replaces a prescale order, and removes expired ones.
-- ARGV[2..6]: id, pool, pods, end (ms), actor
-- Replies: {ordered, now}   {too_many, now}   {lost, now}: the store is empty
operation('prescale', function(ARGV)
  local _, id, pool, pods, ends, by = unpack(ARGV)
  if not is_set_up() then return {'lost', now} end
  local fields, number = try('HGETALL', K.prescale), 0
  if fields.err then
    -- Orders under a key of another type count as none.
    run('DEL', K.prescale)
    fields = {}
  end
  for i = 1, #fields, 2 do
    local order = parse_order(fields[i + 1])
    if not order or order.ends <= now then
      run('HDEL', K.prescale, fields[i])
    elseif fields[i] ~= id then
      number = number + 1
    end
  end
  if number >= RULES.MAX_PRESCALE_ORDERS then return {'too_many', now} end
  run('HSET', K.prescale, id, ends .. ' ' .. pods .. ' ' .. pool)
  record_event('prescale_set', '', '', pool, '', pods .. ' ' .. text_of(floor(tonumber(ends) / 1000)) .. ' ' .. by)
  return {'ordered', now}
end)
