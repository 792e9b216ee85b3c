-- pod_row: a pod as queries return it.

local function pod_row(pod_name)
  local uid, address, ready, terminating, at_risk, restarts, pin, quarantined_until = unpack(read('HMGET',
    K.pod .. pod_name, 'uid', 'address', 'ready', 'terminating', 'at_risk', 'restarts', 'pin', 'quarantined_until'))
  if not ready then return nil end
  local tier = try('GET', K.pod_tier .. pod_name)
  local is_draining = run('EXISTS', K.pod_draining .. pod_name) == 1
  local deadline = is_draining and try('ZSCORE', K.draining, pod_name)
  if is_draining and type(deadline) ~= 'string' then deadline = now end
  local calls = read('ZRANGE', K.pod_calls .. pod_name, 0, -1, 'WITHSCORES')
  local rows = {}
  for i = 1, #calls, 2 do
    local call, lease_until = calls[i], calls[i + 1]
    rows[#rows + 1] = call
    rows[#rows + 1] = run('HGET', K.call .. call, 'at') or '0'
    rows[#rows + 1] = lease_until
  end
  return {pod_name, type(tier) == 'string' and tier or '', uid or '', address or '', ready, terminating or '0',
    at_risk or '0', restarts or '0', pin or '', deadline and tostring(deadline) or '', quarantined_until or '', rows,
    is_draining and is_surplus(pod_name) and '1' or '0'}
end
