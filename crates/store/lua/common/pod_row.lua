-- pod_row: a pod as readers see it.
local function pod_row(pod)
  local uid, address, ready, terminating, restarts, pin, quarantined_until = unpack(read('HMGET', K.pod .. pod,
    'uid', 'address', 'ready', 'terminating', 'restarts', 'pin', 'quarantined_until'))
  if not ready then return nil end
  local tier = try('GET', K.pod_tier .. pod)
  local is_draining = run('EXISTS', K.pod_draining .. pod) == 1
  local deadline = is_draining and try('ZSCORE', K.draining, pod)
  if is_draining and type(deadline) ~= 'string' then deadline = now end
  local calls = read('ZRANGE', K.pod_calls .. pod, 0, -1, 'WITHSCORES')
  local shown = {}
  for i = 1, #calls, 2 do
    local call, ends = calls[i], calls[i + 1]
    shown[#shown + 1] = call
    shown[#shown + 1] = run('HGET', K.call .. call, 'at') or '0'
    shown[#shown + 1] = ends
  end
  return {pod, type(tier) == 'string' and tier or '', uid or '', address or '', ready, terminating or '0',
    restarts or '0', pin or '', deadline and tostring(deadline) or '', quarantined_until or '', shown}
end
