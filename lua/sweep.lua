#!lua flags=allow-oom
-- Ends the leases and drains whose deadline has come, oldest first.
-- ARGV[3]: at most so many of each
-- Replies: {swept, now, {call, pod, source pool, lasted, had its stream not started (1, 0), ...}, {pods no longer draining}, is the store set up (1, 0)}
-- include: base
-- include: pod
local expired, undrained = {}, {}
if not is_set_up() then return {'swept', now, expired, undrained, 0} end
for _, call in ipairs(read('ZRANGEBYSCORE', P .. 'calls', '-inf', now, 'LIMIT', 0, ARGV[3])) do
  local record = record_of(call, 'pod_name', 'source_pool', 'at', 'merchant_id', 'provisional')
  local f = record[1] and readable_facts_of(record[1])
  if f then read_table(f) end
  end_call(f or nil, call, record[4], record[5])
  if f then resettle(f) end
  if record[1] then
    local pool = pool_text(record[2], f and f.tier)
    local missed = record[5] == '1' and 1 or 0
    if missed == 1 then
      -- Its stream may still come.
      redis.call('HSET', P .. 'missed:' .. call, 'pod_name', record[1], 'merchant_id', record[4] or '')
      redis.call('PEXPIRE', P .. 'missed:' .. call, 3600000)
    end
    for _, value in ipairs({call, record[1], pool, lasted(record[3]), missed}) do expired[#expired + 1] = value end
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
return {'swept', now, expired, undrained, 1}
