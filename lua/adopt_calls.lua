#!lua
-- Takes over calls that the older router left: each with a pod is live for one
-- more lease, on an exclusive pod only if the pod's lease names it.
-- ARGV[3..4]: lease (ms), life of the record (ms); then the calls
-- Replies: {adopted, now, calls taken over, calls dropped}
-- include: base
local lease, life, taken, dropped = tonumber(ARGV[3]), tonumber(ARGV[4]), 0, 0
for i = 5, #ARGV do
  local call = ARGV[i]
  local record = read('HMGET', P .. 'call:' .. call, 'pod_name', 'allocated_at', 'source_pool')
  local pod = record[1]
  local tier = pod and redis.call('GET', P .. 'pod:tier:' .. pod)
  local kind = tier and kind_of(tier)
  local live = tier and (kind and kind.kind == 'shared' or redis.call('GET', P .. 'lease:' .. pod) == call)
  if live then
    redis.call('ZADD', P .. 'calls', 'NX', now + lease, call)
    redis.call('ZADD', P .. 'pod:calls:' .. pod, 'NX', now + lease, call)
    redis.call('HSET', P .. 'call:' .. call, 'at', tonumber(record[2] or 0) * 1000)
    redis.call('HDEL', P .. 'call:' .. call, '_lock')
    redis.call('PEXPIRE', P .. 'call:' .. call, life + SLACK)
    taken = taken + 1
  else
    redis.call('DEL', P .. 'call:' .. call)
    dropped = dropped + 1
  end
end
return {'adopted', now, taken, dropped}
