#!lua flags=allow-oom
-- Gives calls whose stream has not started yet more time: nobody could tell us of it.
-- ARGV[3..5]: cursor, about how many calls, time from now (ms)
-- Replies: {spared, now, next cursor}
-- include: base
-- include: pod
local until_then = now + tonumber(ARGV[5])
local scanned = read('SSCAN', P .. 'provisional', ARGV[3], 'COUNT', ARGV[4])
for _, call in ipairs(scanned[2]) do
  local record = record_of(call, 'pod_name', 'provisional', 'merchant_id')
  if record[2] ~= '1' then
    redis.call('SREM', P .. 'provisional', call)
  elseif tonumber(redis.call('ZSCORE', P .. 'calls', call) or until_then) < until_then then
    local f = readable_facts_of(record[1])
    extend(f, call, until_then, nil, record[3])
    if f then place_calls(f) end
  end
end
return {'spared', now, scanned[1]}
