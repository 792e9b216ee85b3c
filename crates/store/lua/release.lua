-- Ends a call and frees its pod. With a request id it is a compensating release: the allocation may have happened, but
-- its request was not answered.
-- ARGV[2..8]: call, cause (agent, provider, operator, stream, abandoned), and optionally: pod that the call must be on,
--   request id to compensate, pod attempt that is over, time of the request (ms) for a deferred release, fingerprint of
--   the signed request to compensate
-- Replies: {released, now, pod, source pool, lasted (ms), pool now, was draining (1, 0)}, without the last two for the
--            same pool and no drain
--          {released, now, pod, source pool, lasted (ms), pool now, was draining (1, 0), 1}: a stream is attached; the
--            call ends when its gateway has closed the stream
--          {not_found, now}
--          {waited, now, time in the queue}: the call had no pod yet, and has left the queue
--          {dialed, now}: the call was a dial without an answer; its reservation has ended
operation('release', function(ARGV)
  local _, call, cause, expected_pod, request_id, pod_attempt, requested_at, fingerprint = unpack(ARGV)
  expected_pod, request_id, pod_attempt = expected_pod or '', request_id or '', pod_attempt or ''
  local record = read_record(call)
  local pod_name = record.pod_name
  if not pod_name then
    -- The call waits, or the release reports the cause of an earlier end.
    if request_id ~= '' then return {'not_found', now} end
    local since = expected_pod == '' and leave_queue(call)
    if since then return {'waited', now, max(0, now - since)} end
    local call_end = call_end_of(call)
    local is_that = call_end and (expected_pod == '' or expected_pod == call_end.pod_name)
      and (pod_attempt == '' or tonumber(pod_attempt) == call_end.pod_attempt)
    if is_that and not is_final[call_end.cause] then
      if is_final[cause] then
        update_call_end(call, call_end, cause)
      elseif call_end.cause == 'unconfirmed' or call_end.cause == 'unattached' then
        -- A stream that has ended cannot start any more. A failure of its pod is counted already.
        update_call_end(call, call_end, 'broken')
      end
    end
    if expected_pod == '' and outbound.end_dial(call) then return {'dialed', now} end
    return {'not_found', now}
  end
  if request_id ~= '' then
    -- The call ends when all requests that may have been answered with it are compensated.
    local rest = without_request_id(record.request_ids, request_id)
    if rest ~= '' then
      if rest then run('HSET', K.call .. call, REQUEST_IDS, rest) end
      return {'not_found', now}
    end
    if fingerprint and fingerprint ~= '' then run('DEL', K.seen .. fingerprint) end
  end
  if expected_pod ~= '' and expected_pod ~= pod_name
    or pod_attempt ~= '' and tonumber(pod_attempt) ~= (tonumber(record.pod_attempt) or 0) then
    return {'not_found', now}
  end
  -- A call that began after the release was requested is another call of the same id.
  if requested_at and requested_at ~= '' and (tonumber(record.at or 0) or 0) > tonumber(requested_at) then
    return {'not_found', now}
  end
  local attached = stream_of(record)
  if attached then return end_stream(call, record, attached, cause) end
  return end_released(call, record, cause)
end)
