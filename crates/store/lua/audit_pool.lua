-- Removes pods from the indexes of a pool that they are not in.
-- ARGV[2..5]: tier, index (available, at_risk, assigned, out), cursor, approximate page size
-- Replies: {audited, now, next cursor, members seen, {members or keys repaired}}   {lost, now}: the store is not set up
operation('audit_pool', function(ARGV)
  if not is_set_up() then return {'lost', now} end
  local _, tier, index, cursor, size = unpack(ARGV)
  local kind = kind_of(tier)
  local key, expected_type = pool_keys_of(tier).available, kind and kind.kind == 'shared' and 'zset' or 'set'
  if index == 'at_risk' then key, expected_type = pool_keys_of(tier).at_risk, 'zset' end
  if index == 'assigned' then key, expected_type = pool_keys_of(tier).assigned, 'set' end
  if index == 'out' then key, expected_type = pool_keys_of(tier).out, 'zset' end
  local actual_type = run('TYPE', key).ok
  if actual_type == 'none' then return {'audited', now, '0', 0, {}} end
  if actual_type ~= expected_type or not kind and (index == 'available' or index == 'at_risk') then
    run('DEL', key)
    return {'audited', now, '0', 0, {key}}
  end
  local scanned = run(actual_type == 'set' and 'SSCAN' or 'ZSCAN', key, cursor, 'COUNT', size)
  local next_cursor, members = unpack(scanned)
  local repaired, seen = {}, 0
  for i = 1, #members, actual_type == 'set' and 1 or 2 do
    local pod_name = members[i]
    local is_readable, pod = pcall(facts_of, pod_name)
    seen = seen + 1
    if is_readable and (not pod or pod.tier ~= tier) then
      remove_from_index(key, pod_name)
      repaired[#repaired + 1] = pod_name
    end
  end
  return {'audited', now, next_cursor, seen, repaired}
end)
