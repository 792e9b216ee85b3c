#!lua
-- Takes over pods that the older router left: their tier stays, their draining
-- marks keep the time they have.
-- ARGV[3..]: pool (tier value), then pods
-- Replies: {adopted, now}
-- include: base
local tier = ARGV[3]
redis.call('SADD', P .. 'pools', tier)
for i = 4, #ARGV do
  local pod = ARGV[i]
  local of = redis.call('GET', P .. 'pod:tier:' .. pod)
  if not of then
    redis.call('SET', P .. 'pod:tier:' .. pod, tier)
    of = tier
  end
  redis.call('HSET', P .. 'pod:metadata', pod, cjson.encode({tier = of, name = pod}))
  redis.call('HSETNX', P .. 'pod:' .. pod, 'uid', '')
  redis.call('HSETNX', P .. 'pod:' .. pod, 'ready', '1')
  local left = redis.call('PTTL', P .. 'pod:draining:' .. pod)
  if left > 0 then redis.call('ZADD', P .. 'draining', 'NX', now + left, pod) end
end
return {'adopted', now}
