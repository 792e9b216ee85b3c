-- What some pods of a pool carry, and could carry.
-- ARGV[2..4]: tier, cursor, about how many pods
-- Replies: {load, now, next cursor, live calls, free slots}
operation('pool_load', function(ARGV)
  local _, tier, cursor, size = unpack(ARGV)
  local calls, free = 0, 0
  local kind = kind_of(tier)
  local cap = kind and (kind.kind == 'shared' and kind.cap or 1) or 0
  local scanned = try('SSCAN', names_of(tier).assigned, cursor, 'COUNT', size)
  if scanned.err then
    -- A set of the wrong type has no pods; any other error is one of the whole Redis.
    if not string.find(scanned.err, '^WRONGTYPE') then error(scanned, 0) end
    return {'load', now, '0', 0, 0}
  end
  local next_cursor, pods = unpack(scanned)
  for _, pod in ipairs(pods) do
    local f = readable_facts_of(pod)
    if f then
      calls = calls + f.calls
      if serving(f) then free = free + max(0, cap - f.calls) end
    end
  end
  return {'load', now, next_cursor, calls, free}
end)
