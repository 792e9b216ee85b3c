-- Derives the views of some pods again, and honours what people did by hand: a
-- call without a record is over, a draining mark is a drain.
-- ARGV[2]: how long (ms) a mark without an end lasts; then the pods
-- Replies: {audited, now, '', pods seen, {pods repaired}}   {lost, now}: the store is not set up
local FIRST_POD = 3

operation('audit_pods', function(ARGV)
  if not is_set_up() then return {'lost', now} end
  local _, unbounded_drain = unpack(ARGV, 1, 2)
  local repaired = {}

  -- The views of a pod as they are, to tell whether they were right.
  local function views(f)
    local shown = {tostring(try('GET', K.lease .. f.pod))}
    if f.tier then
      local key = names_of(f.tier).available
      local kind = run('TYPE', key).ok
      shown[#shown + 1] = kind == 'set' and run('SISMEMBER', key, f.pod)
        or kind == 'zset' and tostring(run('ZSCORE', key, f.pod)) or '-'
      shown[#shown + 1] = try('SISMEMBER', names_of(f.tier).assigned, f.pod) == 1 and 1 or 0
      local out = try('ZSCORE', names_of(f.tier).out, f.pod)
      shown[#shown + 1] = type(out) == 'string' and out or '-'
    end
    return table.concat(shown, ' ')
  end

  -- Brings the index of drains in line with a pod's mark. Answers whether it was out.
  local function index_drain(f)
    local marked = try('ZSCORE', K.draining, f.pod)
    marked = type(marked) == 'string'
    if f.draining and not marked then
      local left = run('PTTL', K.pod_draining .. f.pod)
      if left < 0 then left = tonumber(unbounded_drain) end
      view('ZADD', K.draining, now + left, f.pod)
      run('PEXPIRE', K.pod_draining .. f.pod, left + RULES.KEY_SLACK)
      return true
    end
    if marked and not f.draining then
      view('ZREM', K.draining, f.pod)
      return true
    end
    return false
  end

  -- Lets go of calls whose records are gone or name another pod.
  local function drop_calls(f)
    local dropped = false
    for _, call in ipairs(run('ZRANGE', f.calls_key, 0, 999)) do
      local on = read('HGET', K.call .. call, 'pod_name')
      if on ~= f.pod then
        run('ZREM', f.calls_key, call)
        if not on then view('ZREM', K.calls, call) end
        f.calls = f.calls - 1
        dropped = true
      elseif not view('ZSCORE', K.calls, call) then
        view('ZADD', K.calls, run('ZSCORE', f.calls_key, call), call)
        dropped = true
      end
    end
    return dropped
  end

  local function audit(pod)
    -- Facts, not what was made of them.
    local key = K.pod .. pod
    local was_plain = read('HGET', key, 'plain')
    if was_plain then run('HDEL', key, 'plain') end
    local f = facts_of(pod)
    if not f then
      view('HDEL', K.pod_metadata, pod)
      return true
    end
    local before = views(f)
    local wrong = index_drain(f)
    if view('HSETNX', K.pod_metadata, pod, cjson.encode({tier = f.tier or '', name = pod})) == 1 then wrong = true end
    wrong = drop_calls(f) or wrong
    if f.quarantined and not try('ZSCORE', K.quarantined, f.pod) then
      view('ZADD', K.quarantined, now, f.pod)
      wrong = true
    end
    settle(f)
    place(f)
    wrong = wrong or views(f) ~= before or was_plain ~= plain(f)
    serve(f)
    return wrong
  end

  for i = FIRST_POD, #ARGV do
    local pod = ARGV[i]
    local done, wrong = pcall(audit, pod)
    if not done then
      local reason = tostring(type(wrong) == 'table' and wrong.err or wrong)
      repaired[#repaired + 1] = pod .. ' (left as it is: ' .. reason .. ')'
    elseif wrong then
      repaired[#repaired + 1] = pod
    end
  end
  return {'audited', now, '', #ARGV - FIRST_POD + 1, repaired}
end)
