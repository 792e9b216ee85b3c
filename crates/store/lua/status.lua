-- How all pools stand, in time that does not grow with pods or calls.
-- Replies: {status, now, live calls, calls that wait, {tier table: field, value, ...},
--   {tier, assigned, available, leaving, not ready, in quarantine, calls that wait, ...}}
operation('status', function(ARGV)
  if not has_tiers() then return {'lost', now} end
  local tiers, pools = run('HGETALL', K.tiers), {}
  for _, tier in ipairs(try('SMEMBERS', K.pools)) do
    local key = names_of(tier).available
    local kind = run('TYPE', key).ok
    pools[#pools + 1] = tier
    pools[#pools + 1] = count('SCARD', names_of(tier).assigned)
    pools[#pools + 1] = kind == 'set' and run('SCARD', key) or kind == 'zset' and run('ZCARD', key) or 0
    pools[#pools + 1] = count('ZCOUNT', names_of(tier).out, 1, 1)
    pools[#pools + 1] = count('ZCOUNT', names_of(tier).out, 2, 2)
    pools[#pools + 1] = count('ZCOUNT', names_of(tier).out, 3, 3)
    pools[#pools + 1] = count('ZCARD', names_of(tier).queue)
  end
  return {'status', now, count('ZCARD', K.calls), count('ZCARD', K.waiting), tiers, pools}
end)
