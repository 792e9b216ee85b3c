#!lua flags=allow-oom
-- Derives the views of some pods again, and honours what people did by hand: a
-- call without a record is over, a draining mark is a drain.
-- ARGV[3]: how long (ms) a mark without an end lasts; then the pods
-- Replies: {audited, now, '', pods seen, {pods repaired}}
-- include: base
-- include: pod
local repaired = {}

-- The views of a pod as they are, to tell whether they were right.
local function views(f)
  local shown = {tostring(redis.call('GET', P .. 'lease:' .. f.pod))}
  if f.tier then
    local key = available_key(f.tier)
    local kind = redis.call('TYPE', key).ok
    shown[#shown + 1] = kind == 'set' and redis.call('SISMEMBER', key, f.pod)
      or kind == 'zset' and tostring(redis.call('ZSCORE', key, f.pod)) or '-'
    shown[#shown + 1] = tostring(redis.pcall('SISMEMBER', assigned_key(f.tier), f.pod))
    shown[#shown + 1] = tostring(redis.pcall('ZSCORE', out_key(f.tier), f.pod))
  end
  return table.concat(shown, ' ')
end

for i = 4, #ARGV do
  local pod = ARGV[i]
  local f = facts_of(pod)
  if not f then
    redis.call('HDEL', P .. 'pod:metadata', pod)
    repaired[#repaired + 1] = pod
  else
    local before, wrong = views(f), false
    local marked = redis.call('ZSCORE', P .. 'draining', pod)
    if f.draining and not marked then
      local left = redis.call('PTTL', P .. 'pod:draining:' .. pod)
      if left < 0 then left = tonumber(ARGV[3]) end
      redis.call('ZADD', P .. 'draining', now + left, pod)
      redis.call('PEXPIRE', P .. 'pod:draining:' .. pod, left + SLACK)
      wrong = true
    elseif marked and not f.draining then
      redis.call('ZREM', P .. 'draining', pod)
      wrong = true
    end
    for _, call in ipairs(redis.call('ZRANGE', P .. 'pod:calls:' .. pod, 0, 999)) do
      local on = read('HGET', P .. 'call:' .. call, 'pod_name')
      if on ~= pod then
        redis.call('ZREM', P .. 'pod:calls:' .. pod, call)
        if not on then redis.call('ZREM', P .. 'calls', call) end
        f.calls = f.calls - 1
        wrong = true
      end
    end
    settle(f)
    place(f)
    if wrong or views(f) ~= before then repaired[#repaired + 1] = pod end
  end
end
return {'audited', now, '', #ARGV - 3, repaired}
