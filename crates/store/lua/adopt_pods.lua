-- Takes over pods that the older router left: their tier stays, their draining
-- marks keep the time they have.
-- ARGV[2..]: pool (tier value), then pods
-- Replies: {adopted, now, {pods left alone, because their keys make no sense}}
local FIRST_POD = 3

operation('adopt_pods', function(ARGV)
  local _, tier = unpack(ARGV, 1, 2)
  view('SADD', K.pools, tier)
  -- Only what can be a pod's name: it becomes part of keys.
  local function is_pod(name)
    return #name <= 63 and name ~= 'metadata' and string.find(name, '^[a-z0-9][a-z0-9-]*$')
      and string.sub(name, -1) ~= '-'
  end
  local taken = {}
  for i = FIRST_POD, #ARGV do
    local pod = ARGV[i]
    if is_pod(pod) then taken[#taken + 1] = pod end
  end
  local function take(pod)
    local of = run('GET', K.pod_tier .. pod)
    if not of then
      run('SET', K.pod_tier .. pod, tier)
      of = tier
    end
    run('HSETNX', K.pod .. pod, 'uid', '')
    run('HSETNX', K.pod .. pod, 'ready', '1')
    view('HSET', K.pod_metadata, pod, cjson.encode({tier = of, name = pod}))
    local left = run('PTTL', K.pod_draining .. pod)
    if left > 0 then view('ZADD', K.draining, 'NX', now + left, pod) end
  end
  local odd = {}
  for _, pod in ipairs(taken) do
    if not pcall(take, pod) then odd[#odd + 1] = pod end
  end
  return {'adopted', now, odd}
end)
