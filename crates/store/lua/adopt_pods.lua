-- Adopts pods of the older router: they keep their tier, and their draining marks keep the remaining time.
-- ARGV[2..]: pool (tier value), then pods
-- Replies: {adopted, now, {pods skipped, because their keys have the wrong type}}
local FIRST_POD = 3

operation('adopt_pods', function(ARGV)
  local _, tier = unpack(ARGV, 1, 2)
  run_index('SADD', K.pools, tier)
  -- Accepts valid pod names only, because they become parts of keys.
  local function is_pod_name(name)
    return #name <= 63 and name ~= 'metadata' and string.find(name, '^[a-z0-9][a-z0-9-]*$')
      and string.sub(name, -1) ~= '-'
  end
  local pod_names = {}
  for i = FIRST_POD, #ARGV do
    local pod_name = ARGV[i]
    if is_pod_name(pod_name) then pod_names[#pod_names + 1] = pod_name end
  end
  local function adopt(pod_name)
    local current_tier = run('GET', K.pod_tier .. pod_name)
    if not current_tier then
      run('SET', K.pod_tier .. pod_name, tier)
      current_tier = tier
    end
    run('HSETNX', K.pod .. pod_name, 'uid', '')
    run('HSETNX', K.pod .. pod_name, 'ready', '1')
    run_index('HSET', K.pod_metadata, pod_name, cjson.encode({tier = current_tier, name = pod_name}))
    local left = run('PTTL', K.pod_draining .. pod_name)
    if left > 0 then run_index('ZADD', K.draining, 'NX', now + left, pod_name) end
  end
  local skipped = {}
  for _, pod_name in ipairs(pod_names) do
    if not pcall(adopt, pod_name) then skipped[#skipped + 1] = pod_name end
  end
  return {'adopted', now, skipped}
end)
