#!lua flags=allow-oom
-- The stream of a call has started on its pod: the call keeps it for a whole lease.
-- One that came too late takes the pod again, if that is still free.
-- ARGV[3..6]: call, pod, lease (ms), life of the record (ms)
-- Replies: {confirmed, now}   {retaken, now, source pool}   {unknown, now}   {lost, now}: the store is empty
-- include: base
-- include: pod
local call, pod, lease, life = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local deadline = now + lease
local record = read('HMGET', P .. 'call:' .. call, 'pod_name', 'provisional', 'merchant_id')
if record[1] and record[1] ~= pod then return {'unknown', now} end
if record[1] and record[2] ~= '1' then return {'confirmed', now} end
local f = facts_of(pod)
if record[1] then
  extend(f, call, deadline, life, record[3])
  redis.call('HSET', P .. 'call:' .. call, 'provisional', '')
  view('SREM', P .. 'provisional', call)
  if f then place_calls(f) end
  return {'confirmed', now}
end
if read('HEXISTS', P .. 'tiers', ':chain') == 0 then return {'lost', now} end
local missed = read('HMGET', P .. 'missed:' .. call, 'pod_name', 'merchant_id')
local kind = f and f.tier and kind_of(f.tier)
local room = kind and serving(f) and f.calls < (kind.kind == 'shared' and kind.cap or 1)
if missed[1] ~= pod or not room then return {'unknown', now} end
extend(f, call, deadline, nil, missed[2])
redis.call('HSET', P .. 'call:' .. call, 'pod_name', pod, 'source_pool', source_pool(f.tier),
  'merchant_id', missed[2] or '', 'allocated_at', math.floor(now / 1000), 'at', now, 'tried', '', 'attempt', '', 'provisional', '')
redis.call('PEXPIRE', P .. 'call:' .. call, life + SLACK)
redis.call('DEL', P .. 'missed:' .. call)
f.calls = f.calls + 1
place_calls(f)
return {'retaken', now, source_pool(f.tier)}
