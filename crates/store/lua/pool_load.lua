-- Counts the live calls and free slots of a page of a pool's pods.
-- ARGV[2..4]: tier, cursor, approximate page size
-- Replies: {load, now, next cursor, live calls, free slots}
operation('pool_load', function(ARGV)
  local _, tier, cursor, size = unpack(ARGV)
  local calls, free = 0, 0
  local kind = kind_of(tier)
  local cap = kind and (kind.kind == 'shared' and kind.cap or 1) or 0
  local scanned = try('SSCAN', pool_keys_of(tier).assigned, cursor, 'COUNT', size)
  if scanned.err then
    -- An index of the wrong type has no pods; any other error concerns the whole Redis.
    if not string.find(scanned.err, '^WRONGTYPE') then error(scanned, 0) end
    return {'load', now, '0', 0, 0}
  end
  local next_cursor, pod_names = unpack(scanned)
  for _, pod_name in ipairs(pod_names) do
    local pod = readable_facts_of(pod_name)
    if pod then
      calls = calls + pod.calls
      if is_serving(pod) then free = free + max(0, cap - pod.calls) end
    end
  end
  return {'load', now, next_cursor, calls, free}
end)
