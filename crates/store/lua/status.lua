-- Returns the state of all pools, in time that does not grow with pods or calls.
-- Replies: {status, now, live calls, waiting calls, {tier table: field, value, ...},
--   {tier, assigned, available, leaving, not ready, in quarantine, waiting calls, ...}, {bounds: tier, text, ...}}
operation('status', function(ARGV)
  if not has_tiers() then return {'lost', now} end
  local tiers, pools = run('HGETALL', K.tiers), {}
  for _, tier in ipairs(try('SMEMBERS', K.pools)) do
    local keys = pool_keys_of(tier)
    local kind = run('TYPE', keys.available).ok
    pools[#pools + 1] = tier
    pools[#pools + 1] = count('SCARD', keys.assigned)
    pools[#pools + 1] = count('ZCARD', keys.at_risk)
      + (kind == 'set' and run('SCARD', keys.available) or kind == 'zset' and run('ZCARD', keys.available) or 0)
    pools[#pools + 1] = count('ZCOUNT', keys.out, 1, 1)
    pools[#pools + 1] = count('ZCOUNT', keys.out, 2, 2)
    pools[#pools + 1] = count('ZCOUNT', keys.out, 3, 3)
    pools[#pools + 1] = count('ZCARD', keys.queue)
  end
  -- Bounds under a key of another type count as none; the recovery rewrites them.
  local bounds = try('HGETALL', K.tier_bounds)
  if bounds.err then bounds = {} end
  return {'status', now, count('ZCARD', K.calls), count('ZCARD', K.waiting), tiers, pools, bounds}
end)
