-- Removes reservations without a record from the index of reservations, and restores the others in the lines of their
-- numbers and among the dials of their merchants.
-- ARGV[2..3]: cursor, approximate page size
-- Replies: {audited, now, next cursor, reservations seen, {reservations repaired}}
--          {lost, now}: the store is not set up
operation('audit_reservations', function(ARGV)
  if not is_set_up() then return {'lost', now} end
  local _, cursor, size = unpack(ARGV)
  local next_cursor, found = unpack(run_index('ZSCAN', K.reservations, cursor, 'COUNT', size))
  local repaired, seen = {}, 0
  for i = 1, #found, 2 do
    local facts = outbound.get(found[i])
    seen = seen + 1
    if not facts then
      run('ZREM', K.reservations, found[i])
      repaired[#repaired + 1] = found[i]
    else
      local has_line = not outbound.take_line(facts.number, facts.id)
      local added = run_index('ZADD', dials_key(facts.merchant), text_of(facts.ends), facts.id)
      if added > 0 or not has_line then repaired[#repaired + 1] = facts.id end
    end
  end
  return {'audited', now, next_cursor, seen, repaired}
end)
