-- Takes over calls that the older router left: each with a pod is live for one more lease, on an exclusive pod only if
-- the pod's lease names it. Calls that wait for a pod keep their places: a store of ours that has lost its schema is
-- adopted, too.
-- ARGV[2..3]: lease (ms), life of the record (ms); then the calls
-- Replies: {adopted, now, calls taken over, calls dropped}
local FIRST_CALL = 4

operation('adopt_calls', function(ARGV)
  local _, lease, life = unpack(ARGV, 1, 3)
  local deadline, taken, dropped = now + tonumber(lease), 0, 0
  -- Whether calls of a tier share pods; a tier that the table does not know shows
  -- it by the type of its view.
  local function is_shared(tier)
    local kind = kind_of(tier)
    if kind then return kind.kind == 'shared' end
    return run('TYPE', names_of(tier).available).ok == 'zset'
  end
  for i = FIRST_CALL, #ARGV do
    local call = ARGV[i]
    local record = try('HMGET', K.call .. call, 'pod_name', 'allocated_at', 'merchant_id', 'stage')
    local pod, allocated_at, merchant, stage = unpack(record)
    local tier = pod and try('GET', K.pod_tier .. pod)
    local holder = pod and try('GET', K.lease .. pod)
    if record.err or type(tier) == 'table' or type(holder) == 'table' then
      -- Keys of another type than a call's record or a pod's keys have: left alone.
      dropped = dropped + 1
    elseif tier and (is_shared(tier) or holder == call) then
      run('ZADD', K.calls, 'NX', deadline, call)
      run('ZADD', K.pod_calls .. pod, 'NX', deadline, call)
      local at = (tonumber(allocated_at) or floor(now / 1000)) * 1000
      run('HSET', K.call .. call, 'at', format('%.0f', math.min(now, at)))
      run('HDEL', K.call .. call, '_lock')
      run('PEXPIRE', K.call .. call, life)
      if merchant and merchant ~= '' then view('ZADD', live_key(merchant), 'NX', deadline, call) end
      taken = taken + 1
    elseif stage ~= 'waiting' then
      run('DEL', K.call .. call)
      dropped = dropped + 1
    end
  end
  return {'adopted', now, taken, dropped}
end)
