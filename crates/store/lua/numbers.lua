-- Returns numbers with a limit of lines.
-- ARGV[2..3]: cursor, approximate page size
-- Replies: {numbers, now, next cursor, {number, limit, lines in use, ...}}
operation('numbers', function(ARGV)
  local _, cursor, size = unpack(ARGV)
  local page = try('HSCAN', K.numbers, cursor, 'COUNT', size)
  if page.err then return {'numbers', now, '0', {}} end
  local next_cursor, limits = unpack(page)
  local numbers = {}
  for i = 1, #limits, 2 do
    for _, value in ipairs({limits[i], limits[i + 1], text_of(count('SCARD', K.lines .. limits[i]))}) do
      numbers[#numbers + 1] = value
    end
  end
  return {'numbers', now, next_cursor, numbers}
end)
