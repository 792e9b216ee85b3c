-- call_row: a call as readers see it.

-- The row of a call, its pod ('' while it waits), merchant and source pool; nil for an unknown call. The row of a call
-- with a pod: {call, pod, source pool, merchant, at, deadline, tried, stage, number of the attempt}; of a waiting call:
-- {call, '', merchant, since, until, poll by, tried}. `deadline` where the caller knows it.
local function call_row(call, deadline)
  local record = read_record(call)
  if not record.pod_name then
    local place = place_of(call)
    if not place then return nil end
    return {call, '', place.merchant, text_of(place.since), text_of(place.ends), text_of(place.poll_by), place.tried},
      '', place.merchant
  end
  deadline = deadline or try('ZSCORE', K.calls, call)
  if type(deadline) ~= 'string' then
    -- The index of all calls has lost it; the pod's own has the same deadline.
    deadline = try('ZSCORE', K.pod_calls .. record.pod_name, call)
    if type(deadline) ~= 'string' then deadline = '0' end
  end
  local pool = pool_text(record.source_pool)
  return {call, record.pod_name, pool, record.merchant_id, tostring(tonumber(record.at) or 0), deadline, record.tried,
    record.stage, tostring(tonumber(record.attempts) or 0)}, record.pod_name, record.merchant_id, pool
end
