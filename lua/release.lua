#!lua flags=allow-oom
-- Ends a call at its own request and gives the pod back.
-- ARGV[3..5]: call, pod it must be on ('' for any), attempt it must stem from ('' for any)
-- Replies: {released, now, pod, source pool, pool now, was draining (1, 0), lasted (ms)}   {not_found, now}
-- include: base
-- include: pod
local call = ARGV[3]
local record = read('HMGET', P .. 'call:' .. call, 'pod_name', 'source_pool', 'at', 'attempt', 'merchant_id', 'provisional')
if not record[1] or ARGV[4] ~= '' and ARGV[4] ~= record[1] or ARGV[5] ~= '' and ARGV[5] ~= record[4] then
  return {'not_found', now}
end
local f = facts_of(record[1])
if f then read_table(f) end
end_call(f, call, record[5], record[6])
local source = pool_text(record[2], f and f.tier)
local pool, draining = source, 0
if f then
  resettle(f)
  redis.call('HSET', P .. 'pod:' .. f.pod, 'released_at', math.floor(now / 1000))
  pool = f.tier and source_pool(f.tier) or pool
  draining = leaving(f) and 1 or 0
end
return {'released', now, record[1], source, pool, draining, lasted(record[3])}
