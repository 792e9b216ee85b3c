-- pod_row: a pod as readers see it.
local function pod_row(pod)
  local fields = read('HMGET', K.pod .. pod, 'uid', 'address', 'ready', 'terminating', 'restarts', 'pin', 'quarantined_until')
  if not fields[3] then return nil end
  local tier = try('GET', K.pod_tier .. pod)
  local is_draining = run('EXISTS', K.pod_draining .. pod) == 1
  local deadline = is_draining and try('ZSCORE', K.draining, pod)
  if is_draining and type(deadline) ~= 'string' then deadline = now end
  local calls = read('ZRANGE', K.pod_calls .. pod, 0, -1, 'WITHSCORES')
  local shown = {}
  for i = 1, #calls, 2 do
    shown[#shown + 1] = calls[i]
    shown[#shown + 1] = run('HGET', K.call .. calls[i], 'at') or '0'
    shown[#shown + 1] = calls[i + 1]
  end
  return {pod, type(tier) == 'string' and tier or '', fields[1] or '', fields[2] or '', fields[3], fields[4] or '0',
    fields[5] or '0', fields[6] or '', deadline and tostring(deadline) or '', fields[7] or '', shown}
end
