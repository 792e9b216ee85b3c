-- call_row: a call as queries return it.

-- Returns the row of a call, its pod ('' while it waits), merchant and source pool; nil for an unknown call. The row of
-- a call with a pod: {call, pod, source pool, merchant, at, deadline, tried, stage, pod attempt, stream}; of a waiting
-- call: {call, '', merchant, since, until, poll by, tried}. `deadline` is passed where the caller has read it.
local function call_row(call, deadline)
  local record = read_record(call)
  if not record.pod_name then
    local entry = queue_entry_of(call)
    if not entry then return nil end
    return {call, '', entry.merchant, text_of(entry.since), text_of(entry.ends), text_of(entry.poll_by), entry.tried},
      '', entry.merchant
  end
  deadline = deadline or try('ZSCORE', K.calls, call)
  if type(deadline) ~= 'string' then
    -- Missing in the index of all calls; the pod's own index has the same deadline.
    deadline = try('ZSCORE', K.pod_calls .. record.pod_name, call)
    if type(deadline) ~= 'string' then deadline = '0' end
  end
  local pool = pool_text(record.source_pool)
  local at, pod_attempt = tostring(tonumber(record.at) or 0), tostring(tonumber(record.pod_attempt) or 0)
  return {call, record.pod_name, pool, record.merchant_id, at, deadline, record.tried, record.stage, pod_attempt,
    record.stream or ''}, record.pod_name, record.merchant_id, pool
end
