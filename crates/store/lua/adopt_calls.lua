-- Takes over calls that the older router left: each with a pod is live for one
-- more lease, on an exclusive pod only if the pod's lease names it. Calls that wait for a pod keep their places: a store
-- of ours that has lost its schema is adopted, too.
-- ARGV[2..3]: lease (ms), life of the record (ms); then the calls
-- Replies: {adopted, now, calls taken over, calls dropped}
operation('adopt_calls', function(ARGV)
  local lease, life, taken, dropped = tonumber(ARGV[2]), ARGV[3], 0, 0
  -- Whether calls of a tier share pods; a tier that the table does not know shows
  -- it by the type of its view.
  local function is_shared(tier)
    local kind = kind_of(tier)
    if kind then return kind.kind == 'shared' end
    return run('TYPE', names_of(tier).available).ok == 'zset'
  end
  for i = 4, #ARGV do
    local call = ARGV[i]
    local record = try('HMGET', K.call .. call, 'pod_name', 'allocated_at', 'merchant_id', 'stage')
    local pod = not record.err and record[1]
    local tier = pod and try('GET', K.pod_tier .. pod)
    local holder = pod and try('GET', K.lease .. pod)
    if record.err or type(tier) == 'table' or type(holder) == 'table' then
      -- Not a call's record, or not a pod's keys, whatever they are: left alone.
      dropped = dropped + 1
    elseif tier and (is_shared(tier) or holder == call) then
      run('ZADD', K.calls, 'NX', now + lease, call)
      run('ZADD', K.pod_calls .. pod, 'NX', now + lease, call)
      local at = (tonumber(record[2]) or floor(now / 1000)) * 1000
      run('HSET', K.call .. call, 'at', format('%.0f', math.min(now, at)))
      run('HDEL', K.call .. call, '_lock')
      run('PEXPIRE', K.call .. call, life)
      if record[3] and record[3] ~= '' then view('ZADD', live_key(record[3]), 'NX', now + lease, call) end
      taken = taken + 1
    elseif record[4] ~= 'waiting' then
      run('DEL', K.call .. call)
      dropped = dropped + 1
    end
  end
  return {'adopted', now, taken, dropped}
end)
