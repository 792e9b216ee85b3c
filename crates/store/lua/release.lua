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

-- Ends a call in the usual case: it has no stream, no other pod attempt and no line, its pod is plain and becomes idle,
-- no call waits, and the re-registration window is over. `fields` are those of the call's record. Returns the reply;
-- nil in any other case, and then whether the call was removed from its pod's index.
local function end_usual_call(call, cause, fields)
  local pod_name, source_pool, merchant, at, stage, request_ids, pod_attempt, _, stream, _, number = unpack(fields)
  local is_usual = request_ids and source_pool and at and (stage or '') == '' and (pod_attempt or '') == ''
    and not stream and not number and is_final[cause]
  if not is_usual then return nil end
  local key, calls_key = K.pod .. pod_name, K.pod_calls .. pod_name
  local tier = run_protected('HGET', key, 'plain')
  local chain, trusting = unpack(run_protected('HMGET', K.tiers, ':chain', ':trusting_until'))
  if not chain or trusting and (tonumber(trusting) or now) >= now then return nil end
  local kinds = parse_chain(chain).kinds
  if not kinds[tier] or source_pool ~= pool_keys_of(tier).source then return nil end
  if run_protected('ZREM', calls_key, call) ~= 1 then return nil end
  if run('EXISTS', calls_key, K.pod_draining .. pod_name, K.waiting) ~= 0 then return nil, true end
  run_index('ZREM', K.calls, call)
  run('DEL', K.call .. call, K.lease .. pod_name)
  if merchant and merchant ~= '' then run_index('ZREM', live_key(merchant), call) end
  local time = lasted(at)
  record_event('ended', call, pod_name, '', merchant, cause .. ' ' .. format('%d', time))
  chain_kinds = kinds
  place_calls({name = pod_name, key = key, tier = tier, calls = 0, released_at = seconds, has_no_lease = true,
    is_plain = true})
  return {'released', now, pod_name, source_pool, time}
end

operation('release', function(ARGV)
  local _, call, cause, expected_pod, request_id, pod_attempt, requested_at, fingerprint = unpack(ARGV)
  local fields, is_removed = record_fields(call), nil
  if fields[1] and not expected_pod then
    local reply
    reply, is_removed = end_usual_call(call, cause, fields)
    if reply then return reply end
  end
  expected_pod, request_id, pod_attempt = expected_pod or '', request_id or '', pod_attempt or ''
  local record = read_record(call, fields)
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
  return end_released(call, record, cause, is_removed)
end)
