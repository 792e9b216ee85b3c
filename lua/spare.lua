#!lua flags=allow-oom
-- Gives calls that could not tell us of themselves more time: those whose lease is
-- short, because their stream has not started yet or they have not come for their
-- pod, and those that wait.
-- ARGV[3..6]: what (short, waiting), cursor, about how many calls, time from now (ms)
-- Replies: {spared, now, next cursor}
-- include: base
-- include: pod
local until_then = now + tonumber(ARGV[6])
if ARGV[3] == 'waiting' then
  local scanned = read('ZSCAN', P .. 'waiting', ARGV[4], 'COUNT', ARGV[5])
  for i = 1, #scanned[2], 2 do
    if tonumber(scanned[2][i + 1]) < until_then then redis.call('ZADD', P .. 'waiting', until_then, scanned[2][i]) end
  end
  return {'spared', now, scanned[1]}
end
local scanned = read('SSCAN', P .. 'short', ARGV[4], 'COUNT', ARGV[5])
for _, call in ipairs(scanned[2]) do
  local record = record_of(call, 'pod_name', 'stage', 'merchant_id')
  if (record[2] or '') == '' then
    redis.call('SREM', P .. 'short', call)
  elseif tonumber(redis.call('ZSCORE', P .. 'calls', call) or until_then) < until_then then
    local f = readable_facts_of(record[1])
    extend(f, call, until_then, nil, record[3])
    if f then place_calls(f) end
  end
end
return {'spared', now, scanned[1]}
