#!lua flags=allow-oom
-- Ends the leases and drains whose deadline has come, oldest first.
-- ARGV[3]: at most so many of each
-- Replies: {swept, now, {call, pod, source pool, lasted, ...}, {pods no longer draining}, is the store set up (1, 0)}
-- include: base
-- include: pod
local expired, undrained = {}, {}
for _, call in ipairs(read('ZRANGEBYSCORE', P .. 'calls', '-inf', now, 'LIMIT', 0, ARGV[3])) do
  local record = read('HMGET', P .. 'call:' .. call, 'pod_name', 'source_pool', 'at')
  local f = record[1] and readable_facts_of(record[1])
  if f then read_table(f) end
  end_call(f or nil, call)
  if f then resettle(f) end
  if record[1] then
    local lasted = now - tonumber(record[3] or now)
    for _, value in ipairs({call, record[1], record[2] or '', lasted}) do expired[#expired + 1] = value end
  end
end
local due = redis.pcall('ZRANGEBYSCORE', P .. 'draining', '-inf', now, 'LIMIT', 0, ARGV[3])
if due.err then
  redis.call('DEL', P .. 'draining')
  due = {}
end
for _, pod in ipairs(due) do
  local left = redis.call('PTTL', P .. 'pod:draining:' .. pod)
  if left > SLACK + 1000 then
    -- Someone has set the mark anew, by hand and for longer.
    redis.call('ZADD', P .. 'draining', now + left, pod)
  else
    redis.call('ZREM', P .. 'draining', pod)
    redis.call('DEL', P .. 'pod:draining:' .. pod)
    local f = readable_facts_of(pod)
    if f then
      settle(f)
      place(f)
    end
    undrained[#undrained + 1] = pod
  end
end
return {'swept', now, expired, undrained, redis.call('EXISTS', P .. 'schema')}
