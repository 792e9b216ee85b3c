-- Derives the indexes of some pods again, and applies changes made by hand: a call without a record is over, a draining
-- mark is a drain.
-- ARGV[2]: time (ms) of a draining mark without an expiry; then the pods
-- Replies: {audited, now, '', pods seen, {pods repaired}}   {lost, now}: the store is not set up
local FIRST_POD = 3

operation('audit_pods', function(ARGV)
  if not is_set_up() then return {'lost', now} end
  local _, unbounded_drain = unpack(ARGV, 1, 2)
  local repaired = {}

  -- Returns the indexes of a pod as text, for a comparison before and after.
  local function indexes_of(pod)
    local parts = {tostring(try('GET', K.lease .. pod.name))}
    if pod.tier then
      local key = pool_keys_of(pod.tier).available
      local kind = run('TYPE', key).ok
      parts[#parts + 1] = kind == 'set' and run('SISMEMBER', key, pod.name)
        or kind == 'zset' and tostring(run('ZSCORE', key, pod.name)) or '-'
      parts[#parts + 1] = try('SISMEMBER', pool_keys_of(pod.tier).assigned, pod.name) == 1 and 1 or 0
      for _, index in ipairs({'at_risk', 'out'}) do
        local score = try('ZSCORE', pool_keys_of(pod.tier)[index], pod.name)
        parts[#parts + 1] = type(score) == 'string' and score or '-'
      end
    end
    return table.concat(parts, ' ')
  end

  -- Derives the entry in the index of drains from a pod's mark. Returns whether it was wrong.
  local function index_drain(pod)
    local score = try('ZSCORE', K.draining, pod.name)
    local is_indexed = type(score) == 'string'
    if pod.draining and not is_indexed then
      local left = run('PTTL', K.pod_draining .. pod.name)
      if left < 0 then left = tonumber(unbounded_drain) end
      run_index('ZADD', K.draining, now + left, pod.name)
      run('PEXPIRE', K.pod_draining .. pod.name, left + RULES.KEY_SLACK)
      return true
    end
    if is_indexed and not pod.draining then
      run_index('ZREM', K.draining, pod.name)
      return true
    end
    return false
  end

  -- Removes calls whose records are gone or name another pod. Returns whether the index was wrong.
  local function drop_calls(pod)
    local is_wrong = false
    for _, call in ipairs(run('ZRANGE', pod.calls_key, 0, 999)) do
      local pod_name = read('HGET', K.call .. call, 'pod_name')
      if pod_name ~= pod.name then
        run('ZREM', pod.calls_key, call)
        if not pod_name then run_index('ZREM', K.calls, call) end
        pod.calls = pod.calls - 1
        is_wrong = true
      elseif not run_index('ZSCORE', K.calls, call) then
        run_index('ZADD', K.calls, run('ZSCORE', pod.calls_key, call), call)
        is_wrong = true
      end
    end
    return is_wrong
  end

  local function audit(pod_name)
    -- Without the cached `plain`, so that the facts themselves are read.
    local key = K.pod .. pod_name
    local was_plain = read('HGET', key, 'plain')
    if was_plain and was_plain ~= '' then run('HSET', key, 'plain', '') end
    local pod = facts_of(pod_name)
    if not pod then
      run_index('HDEL', K.pod_metadata, pod_name)
      return true
    end
    local before = indexes_of(pod)
    local is_wrong = index_drain(pod)
    local metadata = cjson.encode({tier = pod.tier or '', name = pod_name})
    if run_index('HSETNX', K.pod_metadata, pod_name, metadata) == 1 then is_wrong = true end
    is_wrong = drop_calls(pod) or is_wrong
    if pod.quarantined and not try('ZSCORE', K.quarantined, pod.name) then
      run_index('ZADD', K.quarantined, now, pod.name)
      is_wrong = true
    end
    assign_pool(pod)
    place(pod)
    is_wrong = is_wrong or indexes_of(pod) ~= before or was_plain ~= plain_pool(pod)
    hand_off_free_slots(pod)
    return is_wrong
  end

  for i = FIRST_POD, #ARGV do
    local pod_name = ARGV[i]
    local is_done, result = pcall(audit, pod_name)
    if not is_done then
      local reason = tostring(type(result) == 'table' and result.err or result)
      repaired[#repaired + 1] = pod_name .. ' (not repaired: ' .. reason .. ')'
    elseif result then
      repaired[#repaired + 1] = pod_name
    end
  end
  return {'audited', now, '', #ARGV - FIRST_POD + 1, repaired}
end)
