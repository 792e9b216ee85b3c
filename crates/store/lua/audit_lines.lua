-- Removes calls and reservations that are over from the lines of a number.
-- ARGV[2..4]: number, cursor, approximate page size
-- Replies: {audited, now, next cursor, lines seen, {users removed}}   {lost, now}: the store is not set up
operation('audit_lines', function(ARGV)
  if not is_set_up() then return {'lost', now} end
  local _, number, cursor, size = unpack(ARGV)
  local key = K.lines .. number
  local next_cursor, holders = unpack(run_index('SSCAN', key, cursor, 'COUNT', size))
  local repaired = {}
  for _, holder in ipairs(holders) do
    if not outbound.uses_line(number, holder) then
      run('SREM', key, holder)
      repaired[#repaired + 1] = number .. ' ' .. holder
    end
  end
  return {'audited', now, next_cursor, #holders, repaired}
end)
