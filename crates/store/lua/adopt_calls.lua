-- Adopts calls of the older router: each call with a pod is live for one more lease; on an exclusive pod only if the
-- pod's lease names it. Waiting calls keep their queue entries: a store that has lost its schema is adopted as well.
-- ARGV[2..3]: lease (ms), life of the record (ms); then the calls
-- Replies: {adopted, now, calls adopted, calls dropped}
local FIRST_CALL = 4

operation('adopt_calls', function(ARGV)
  local _, lease, life = unpack(ARGV, 1, 3)
  local deadline, adopted, dropped = now + tonumber(lease), 0, 0
  -- Returns whether calls of a tier share pods. The index type shows it for a tier that the table does not have.
  local function is_shared(tier)
    local kind = kind_of(tier)
    if kind then return kind.kind == 'shared' end
    return run('TYPE', pool_keys_of(tier).available).ok == 'zset'
  end
  for i = FIRST_CALL, #ARGV do
    local call = ARGV[i]
    local record = record_of(call)
    local pod_name, merchant = record.pod_name, record.merchant_id
    local tier = pod_name and try('GET', K.pod_tier .. pod_name)
    local holder = pod_name and try('GET', K.lease .. pod_name)
    if record.err or type(tier) == 'table' or type(holder) == 'table' then
      -- Keys of another type than a call's record or a pod's keys are not touched.
      dropped = dropped + 1
    elseif tier and (is_shared(tier) or holder == call) then
      run('ZADD', K.calls, 'NX', deadline, call)
      run('ZADD', K.pod_calls .. pod_name, 'NX', deadline, call)
      local allocated_at = fields_of(call, 'allocated_at')
      local at = (tonumber(allocated_at) or floor(now / 1000)) * 1000
      run('HSET', K.call .. call, 'at', format('%.0f', math.min(now, at)))
      run('HSETNX', K.call .. call, REQUEST_IDS, '')
      run('HDEL', K.call .. call, '_lock')
      run('PEXPIRE', K.call .. call, life)
      if merchant ~= '' then run_index('ZADD', live_key(merchant), 'NX', deadline, call) end
      adopted = adopted + 1
    elseif record.stage ~= 'waiting' then
      run('DEL', K.call .. call)
      dropped = dropped + 1
    end
  end
  return {'adopted', now, adopted, dropped}
end)
