-- call_row: a call as readers see it.

-- {call, pod, source pool, merchant, at, deadline, tried, stage, number of the attempt} of one
-- with a pod; {call, '', merchant, since, until, poll by, tried} of one that waits; nil of one
-- that is not known. `deadline` where the caller knows it.
local function call_row(call, deadline)
  local record = read('HMGET', K.call .. call, 'pod_name', 'source_pool', 'merchant_id', 'at', 'tried', 'stage', 'attempts')
  if not record[1] then
    local place = place_of(call)
    return place and {call, '', place.merchant, text_of(place.since), text_of(place.ends), text_of(place.poll_by), place.tried}
  end
  deadline = deadline or try('ZSCORE', K.calls, call)
  if type(deadline) ~= 'string' then
    -- The index of all calls has lost it; the pod's own has the same deadline.
    deadline = try('ZSCORE', K.pod_calls .. record[1], call)
    if type(deadline) ~= 'string' then deadline = '0' end
  end
  return {call, record[1], pool_text(record[2]), record[3] or '', tostring(tonumber(record[4]) or 0), deadline, record[5] or '',
    record[6] or '', tostring(tonumber(record[7] or 0) or 0)}
end
