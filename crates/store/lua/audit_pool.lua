-- Takes out of a pool's views what does not belong there.
-- ARGV[2..5]: tier, view (available, assigned, out), cursor, about how many members
-- Replies: {audited, now, next cursor, members seen, {members or keys repaired}}   {lost, now}: the store is not set up
operation('audit_pool', function(ARGV)
  if not is_set_up() then return {'lost', now} end
  local _, tier, index, cursor, size = unpack(ARGV)
  local kind = kind_of(tier)
  local key, expected = names_of(tier).available, kind and kind.kind == 'shared' and 'zset' or 'set'
  if index == 'assigned' then key, expected = names_of(tier).assigned, 'set' end
  if index == 'out' then key, expected = names_of(tier).out, 'zset' end
  local is = run('TYPE', key).ok
  if is == 'none' then return {'audited', now, '0', 0, {}} end
  if is ~= expected or index == 'available' and not kind then
    run('DEL', key)
    return {'audited', now, '0', 0, {key}}
  end
  local scanned = run(is == 'set' and 'SSCAN' or 'ZSCAN', key, cursor, 'COUNT', size)
  local next_cursor, members = unpack(scanned)
  local repaired, seen = {}, 0
  for i = 1, #members, is == 'set' and 1 or 2 do
    local pod = members[i]
    local readable, f = pcall(facts_of, pod)
    seen = seen + 1
    if readable and (not f or f.tier ~= tier) then
      drop(key, pod)
      repaired[#repaired + 1] = pod
    end
  end
  return {'audited', now, next_cursor, seen, repaired}
end)
