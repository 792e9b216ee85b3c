-- Returns a page of the reservations that have not expired, by deadline.
-- ARGV[2..4]: deadline and id to continue after ('' for the first page), page size
-- Replies: {reservations, now, {id, record, ...}, deadline and id to continue after ('' if none follow)}
operation('reservations', function(ARGV)
  local _, after, last, size = unpack(ARGV)
  local from, rows = 0, {}
  if after ~= '' then
    -- The last entry may have moved or ended since; entries of the same deadline are then read again.
    local rank = try('ZSCORE', K.reservations, last) == after and run('ZRANK', K.reservations, last)
    from = rank and rank + 1 or count('ZCOUNT', K.reservations, '-inf', '(' .. after)
  end
  local page = try('ZRANGE', K.reservations, from, from + tonumber(size) - 1, 'WITHSCORES')
  if page.err then page = {} end
  for i = 1, #page, 2 do
    local text = try('GET', K.reservation .. page[i])
    local facts = outbound.parse(page[i], text)
    if facts and facts.ends > now then
      rows[#rows + 1] = page[i]
      rows[#rows + 1] = text
    end
  end
  local is_last = #page < 2 * tonumber(size)
  return {'reservations', now, rows, is_last and '' or page[#page], is_last and '' or page[#page - 1]}
end)
