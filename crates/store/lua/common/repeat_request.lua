-- repeat_request: allocate requests of calls that already have a pod, a hand-off or a queue entry.

-- Parses an allocate request and reads the call's record, if any. ARGV as in allocate.lua.
local function parse_request(ARGV)
  local _, call, merchant, lease, life, request_id, stage, pod_attempt, hold, previous, signed, reservation, numbers =
    unpack(ARGV)
  local request = {call = call, merchant = merchant, lease = lease, life = life, request_id = request_id,
    stage = stage or '', pod_attempt = pod_attempt or '', tried = '', signed = signed or '',
    reservation = reservation or '', numbers = numbers or '', number = ''}
  -- Usually neither key exists.
  if run('EXISTS', K.call .. call, K.call_end .. call) > 0 then
    request.has_history = true
    if run('EXISTS', K.call .. call) == 1 then request.record = read_record(call) end
  end
  if hold and hold ~= '' then
    local time, poll_timeout, max_waiting, max_waiting_per_merchant = string.match(hold, '^(%d+) (%d+) (%d+) (%d+)$')
    request.hold_time, request.poll_timeout = tonumber(time), tonumber(poll_timeout)
    request.max_waiting, request.max_waiting_per_merchant = tonumber(max_waiting), tonumber(max_waiting_per_merchant)
  end
  if previous and previous ~= '' then
    local pod_name, attempt, is_settled, max_retries = string.match(previous, '^(%S+) (%d+) (%d) (%d+)$')
    request.previous = {pod_name = pod_name, pod_attempt = tonumber(attempt), is_settled = is_settled == '1',
      max_retries = tonumber(max_retries)}
  end
  return request
end

-- Removes a request id from the list; nil if the list does not contain it. The first position marks the request that
-- created the allocation: '-' takes it when that one is removed, so that no later request becomes the first.
local function without_request_id(request_ids, request_id)
  local text = ' ' .. request_ids .. ' '
  local from, to = string.find(text, ' ' .. request_id .. ' ', 1, true)
  if not from then return nil end
  local rest = string.match(string.sub(text, 1, from) .. string.sub(text, to + 1), '^ *(.-) *$')
  if rest == '' or rest == '-' then return '' end
  return from == 1 and '- ' .. rest or rest
end

-- Returns the reply to a request of a call that has a pod, a hand-off or a queue entry; nil for a new call.
local answer_repeat
function answer_repeat(request)
  local call, record, stage = request.call, request.record, request.stage
  if not record then return nil end
  local key = K.call .. call
  if record.pod_name then
    local pod_name, pool = record.pod_name, pool_text(record.source_pool)
    if record.stage == 'handed' then
      local pod = facts_of(pod_name)
      local entry = not (pod and is_serving(pod)) and requeue(pod, call, record_of(call))
      if entry then
        -- The pod has left service since the hand-off: another pod, or the previous position in the queues.
        if pod then reassign_and_hand_off(pod, false) end
        hand_off_requeued({{call = call, score = tonumber(entry.score)}})
        request.record = read_record(call)
        return answer_repeat(request)
      end
      -- The call accepts the hand-off: its lease begins.
      set_deadline(pod, call, now + request.lease, nil, record.merchant_id)
      run('HSET', key, 'allocated_at', seconds, 'at', text_of(now), REQUEST_IDS, request.request_id, 'stage', stage)
      run('PEXPIRE', key, request.life)
      if stage ~= '' then run('DEL', K.call_end .. call) end
      if pod then place_calls(pod) end
      record_event('fetched', call, pod_name, pool, record.merchant_id)
      return {'new', now, pod_name, pool, record.tried, record.pod_attempt, lasted(record.at), ''}
    end
    -- The first request id again: the first reply was lost.
    local request_ids = record.request_ids
    if string.find(request_ids .. ' ', request.request_id .. ' ', 1, true) == 1 then
      return {'new', now, pod_name, pool, record.tried, record.pod_attempt, '', ''}
    end
    -- Another request that may be answered with this allocation: the call ends only when all of them are compensated.
    -- A list that is too long counts as answered.
    if request_ids ~= '' and not without_request_id(request_ids, request.request_id) then
      run('HSET', key, REQUEST_IDS, #request_ids < 400 and request_ids .. ' ' .. request.request_id or '')
    end
    if PROVISIONAL[record.stage] and PROVISIONAL[stage] then
      -- The caller gets a new document, so its stream has the whole connect timeout again.
      local pod = facts_of(pod_name)
      set_deadline(pod, call, now + request.lease, nil, record.merchant_id)
      if pod then place_calls(pod) end
    end
    return {'existing', now, pod_name, pool, record.tried, record.pod_attempt}
  end
  local entry = record.stage == 'waiting' and queue_entry_of(call)
  if not entry then return nil end
  reset_wait_start(call, entry)
  local has_pool = false
  for tier in string.gmatch(entry.pools, '%S+') do has_pool = has_pool or kind_of(tier) ~= nil end
  if not has_pool then
    if not has_tiers() then return {'lost', now} end
    -- None of its pools exists any more: the call starts over.
    leave_queue(call)
    return nil
  end
  if not request.hold_time then return {'refused', now, entry.tried, '', 'no_pods'} end
  if now >= entry.ends then
    leave_queue(call)
    return {'refused', now, entry.tried, '', 'time_over', max(0, now - entry.since)}
  end
  if set_poll_by(call, entry, next_poll_deadline(entry.ends, request.poll_timeout)) then
    hand_off_requeued({{call = call, score = tonumber(entry.score)}})
  end
  return {'refused', now, entry.tried, '', 'waiting', entry.ends, 0}
end

-- Adds the failovers of the previous pod attempt to the one that the request begins. Returns whether no reconnect is
-- left.
local function count_failovers(request, failovers)
  if request.pod_attempt ~= '' then request.pod_attempt = tostring(tonumber(request.pod_attempt) + failovers) end
  return max(1, request.previous.pod_attempt) + failovers > request.previous.max_retries
end

-- Ends the previous pod attempt of a call. Returns the reply if no reconnect is left.
local function end_previous(request, cause, is_last)
  local call, record = request.call, request.record
  local pod = facts_of(record.pod_name, call)
  request.number = record.number
  end_call(pod, call, record, cause)
  if pod then
    local service_changed = cause == 'broken' and lasted(record.at) < RULES.EARLY_FAILURE and record_failure(pod)
    if is_last then
      reassign_and_hand_off(pod, service_changed)
    elseif assign_pool(pod) or service_changed then
      place(pod)
    else
      place_calls(pod)
    end
  end
  request.released_pod, request.record = pod, {}
  if is_last then return {'refused', now, '', '', 'spent'} end
end

-- Settles the pod attempt of a live call whose stream a gateway relays (`attached`), or was to relay. Only the gateway
-- knows how the stream ended: it is asked, and counts as lost if it does not answer in time. The pod has not failed,
-- and keeps the call. Returns the reply if the call gets no pod.
local function settle_stream(request, attached)
  local record, cause = request.record, 'unattached'
  if attached then
    if is_final[attached.ending] then return {'refused', now, '', '', 'over'} end
    if not request.previous.is_settled then
      end_stream(request.call, record, attached, 'stream')
      return {'refused', now, '', '', 'unsettled'}
    end
    cause = 'gateway'
  end
  request.keeps_pod, request.keeps_leaving = record.pod_name, true
  return end_previous(request, cause, count_failovers(request, tonumber(record.failovers) or 0))
end

-- Ends the previous pod attempt of a call whose stream has ended. Returns the reply if the call gets no other pod. Sets
-- `is_reconnect` if the call is known to have had a pod, `released_pod` to the pod that it has left, and `keeps_pod` to
-- a pod that has not failed and keeps the call, with `keeps_leaving` in service or not.
local function settle_previous(request)
  local previous, record, call = request.previous, request.record or {}, request.call
  local is_last = false
  if record.pod_name then
    request.is_reconnect = true
    local attached = stream_of(record)
    -- A failover, or a stream that came late, changes the pod of a pod attempt.
    local has_gateway = attached or record.stage == 'unattached'
    local is_that = (has_gateway or record.pod_name == previous.pod_name)
      and (tonumber(record.pod_attempt) or 0) == previous.pod_attempt
    if not is_that or record.stage == 'handed' then return nil end
    if has_gateway then return settle_stream(request, attached) end
    if not previous.is_settled then return {'refused', now, '', '', 'unsettled'} end
    return end_previous(request, 'broken', count_failovers(request, 0))
  elseif record.stage == 'waiting' then
    request.is_reconnect = true
    return nil
  else
    local call_end = call_end_of(call)
    request.is_reconnect = call_end ~= nil
    request.number = call_end and call_end.number or ''
    if call_end and (call_end.pod_attempt ~= previous.pod_attempt or is_final[call_end.cause]) then
      return {'refused', now, '', '', 'over'}
    end
    local may_be_updated = call_end and MAY_BE_UPDATED[call_end.cause]
    if may_be_updated and not previous.is_settled then return {'refused', now, '', '', 'unsettled'} end
    if call_end and call_end.cause == 'stream' then
      update_call_end(call, call_end, 'broken')
      local pod = call_end.lasted < RULES.EARLY_FAILURE and facts_of(call_end.pod_name)
      if pod and record_failure(pod) then place(pod) end
    end
    if call_end and (call_end.cause == 'gateway' or call_end.cause == 'unattached') then
      request.keeps_pod = call_end.pod_name
    end
    is_last = count_failovers(request, call_end and call_end.failovers or 0)
  end
  if is_last then return {'refused', now, '', '', 'spent'} end
end

-- Hands the pod that a reconnecting call has left off to waiting calls, once the call itself cannot get it.
local function hand_off_released_pod(request)
  local pod = request.released_pod and readable_facts_of(request.released_pod.name)
  if pod then hand_off_free_slots(pod) end
end
