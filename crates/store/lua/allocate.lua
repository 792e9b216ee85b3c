-- Allocates a pod to a call, repeats the reply for the pod it has, or queues it.
-- ARGV[2..13]: call, merchant ('' for none), lease (ms), life of the record (ms), request id, stage ('provisional',
--   'unattached' or ''), pod attempt ('' if not counted), hold ('' or: hold time, poll timeout, maximum of waiting
--   calls, maximum of the merchant's), previous pod ('' or: pod, pod attempt, '1' if the cause of its end is
--   settled, maximum of retries), signed request ('' or: fingerprint, replay window (ms)), reservation ('' for none),
--   numbers of the call (separated by spaces)
-- Replies: {existing, now, pod, source pool, tried, pod attempt}
--          {new, now, pod, source pool, tried, pod attempt, time in the queue ('' if none), error in the merchant's
--            document, effect of the reservation}, without empty values at the end
--          {refused, now, tried, error in the document, reason}: no_pods, max_calls, max_rate, queue_full, over,
--            unsettled, spent, replayed
--          {refused, now, tried, '', time_over, time in the queue}
--          {refused, now, tried, error in the document, waiting, until, is new (1, 0)}
--          A refusal ends with the effect of the reservation, if the request names one: 'used' and its merchant,
--          'repeated' and its merchant (the first answer was refused for lack of a pod), unknown, other_merchant
--          {lost, now}: the store is empty   {late, now}

-- Returns the limit that another call of a merchant would exceed; nil if none.
local function exceeded_limit(merchant, config)
  if config.max_calls and outbound.calls_room(merchant, config.max_calls, 1) < 1 then return 'max_calls' end
  if config.max_rate == 0 then return 'max_rate' end
  if config.max_rate then
    local nth = try('LINDEX', rate_key(merchant), config.max_rate - 1)
    local age = type(nth) == 'string' and now - (tonumber(nth) or 0)
    -- A negative age means that the clock was set back since.
    if age and age >= 0 and age < RULES.RATE_WINDOW then return 'max_rate' end
  end
end

-- Counts an admitted call against the merchant's rate limit.
local function count_admission(request, config)
  if config.max_rate and not request.is_reconnect and not request.is_dialed then
    local key = rate_key(request.merchant)
    run_index('LPUSH', key, now)
    run('LTRIM', key, 0, config.max_rate - 1)
    run('PEXPIRE', key, RULES.RATE_WINDOW)
  end
end

-- Returns whether the limits of the queue allow another waiting call of this merchant.
local function may_wait(request)
  local merchant_key = request.merchant ~= '' and waiting_key(request.merchant)
  if merchant_key and count('ZCARD', merchant_key) >= request.max_waiting_per_merchant then
    -- Calls whose records were deleted by hand are long overdue here.
    try('ZREMRANGEBYSCORE', merchant_key, '-inf', now - 60000)
  end
  return count('ZCARD', K.waiting) < request.max_waiting
    and not (merchant_key and count('ZCARD', merchant_key) >= request.max_waiting_per_merchant)
end

-- Queues a call for all of its pools. Returns the end of its hold time.
local function enqueue(request, pools, tried, priority)
  -- Higher priorities first, then in order of arrival. A call that had a pod precedes all others.
  local ticket = run_index('INCR', K.tickets) - (request.is_reconnect and RULES.REQUEUE_ADVANTAGE or 0)
  -- A call with a reservation precedes all calls without one.
  if request.is_dialed then priority = RULES.MAX_PRIORITY + 1 end
  local score = -priority * RULES.PRIORITY_STEP + ticket
  local ends = now + request.hold_time
  local entry = {merchant = request.merchant, pools = table.concat(pools, ' '), score = score, since = now, ends = ends,
    tried = tried, poll_by = next_poll_deadline(ends, request.poll_timeout), number = request.number}
  set_queue_entry(request.call, entry, request.pod_attempt)
  return ends
end

-- Returns the pod that keeps a reconnecting call; nil if it cannot. A pod that the call leaves in the same step may be
-- out of service: it serves the call already.
local function kept_pod(request)
  local pod = request.keeps_pod and readable_facts_of(request.keeps_pod)
  if not pod or not pod.tier or not kind_of(pod.tier) then return nil end
  local slots = request.keeps_leaving and slots_of(pod) or cap_of(pod)
  return pod.calls < slots and pod or nil
end

-- Allocates a pod to a new call, queues it, or refuses it.
local function serve_new_call(request, steps, config)
  local pod, tried = kept_pod(request), ''
  -- A call that goes on is served before calls that begin.
  local respects_held = not request.is_reconnect
  if not pod then
    pod, tried = choose_pod(steps, request.previous and request.previous.pod_name, respects_held, request.reserved_in)
  end
  if request.previous and not pod then pod, tried = choose_pod(steps, nil, respects_held) end
  if request.is_dialed and not pod then pod, tried = choose_pod(steps) end
  if request.dial then outbound.finish(request.dial, 'answered', request.call) end
  if pod then
    count_admission(request, config)
    request.tried = tried
    local pool = allocate_pod(pod, request.call, request, now + request.lease, request.life)
    if request.stage ~= '' and (request.has_history or request.previous) then run('DEL', K.call_end .. request.call) end
    if tried == '' and request.pod_attempt == '' and config.malformed == '' then
      return {'new', now, pod.name, pool}
    end
    return {'new', now, pod.name, pool, tried, request.pod_attempt, '', config.malformed}
  end
  local pools = {}
  for _, step in ipairs(steps) do
    if step.tier then pools[#pools + 1] = step.tier end
  end
  if (request.hold_time or 0) == 0 or #pools == 0 then
    return {'refused', now, tried, config.malformed, 'no_pods'}
  end
  if not may_wait(request) then return {'refused', now, tried, config.malformed, 'queue_full'} end
  local ends = enqueue(request, pools, tried, config.priority)
  count_admission(request, config)
  return {'refused', now, tried, config.malformed, 'waiting', ends, 1}
end

-- Looks up the reservation of a new call. A usable one determines the merchant of the call and the number of its line.
-- Returns its effect; nil if the request names none.
local function apply_reservation(request)
  if request.reservation == '' or request.previous then return nil end
  local dial = outbound.outstanding(request.reservation)
  local facts = dial or outbound.missed_answer(request.call, request.reservation)
  if not facts then return 'unknown' end
  if request.merchant ~= '' and request.merchant ~= facts.merchant then return 'other_merchant' end
  request.dial, request.reserved, request.is_dialed, request.reserved_in = dial, facts, true, facts.tier
  request.merchant, request.number = facts.merchant, facts.number
  return (dial and 'used ' or 'repeated ') .. facts.merchant
end

-- Keeps the reservation of an answer that finds no pod, so that a repeat of the request is served like the first.
local function keep_missed_answer(request, reply)
  local outcome, _, _, _, reason = unpack(reply)
  if outcome == 'refused' and reason ~= 'waiting' then
    outbound.set_missed_answer(request.call, request.reserved)
  else
    run('DEL', K.missed_answer .. request.call)
  end
end

-- Adds the effect of a reservation to a reply.
local function with_effect(reply, effect)
  if not effect then return reply end
  if reply[1] == 'new' then
    for i = 5, 8 do reply[i] = reply[i] or '' end
    reply[9] = effect
  elseif reply[1] == 'refused' then
    reply[#reply + 1] = effect
  end
  return reply
end

-- Returns the reply to a request, without replay protection.
local function answer(request)
  local repeated = request.previous and settle_previous(request) or answer_repeat(request)
  if repeated then return repeated end
  local effect = apply_reservation(request)
  local steps, config, document = chain_of(request.merchant)
  if not steps then return {'lost', now} end
  local is_limited = document and not request.is_reconnect and not request.is_dialed
  local limit = is_limited and exceeded_limit(request.merchant, config)
  if limit then return with_effect({'refused', now, '', config.malformed, limit}, effect) end
  if not request.is_reconnect and not request.is_dialed then
    request.number = outbound.limited_number(request.numbers)
  end
  local reply = serve_new_call(request, steps, config)
  if request.reserved then keep_missed_answer(request, reply) end
  hand_off_released_pod(request)
  if request.dial then outbound.hand_off_pool(request.dial.tier) end
  return with_effect(reply, effect)
end

-- Refusals after which a signed request allocates no pod once its call has ended. A request that was refused for lack
-- of pods has begun nothing and may be repeated.
local CONSUMING = {waiting = true, over = true, spent = true}

-- Returns the reply to a signed request, with replay protection: a signature is valid for one call.
local function answer_signed(request)
  local fingerprint, window = string.match(request.signed, '^(%S+) (%d+)$')
  local key = K.seen .. fingerprint
  if not request.record and run('EXISTS', key) == 1 then return {'refused', now, '', '', 'replayed'} end
  local reply = answer(request)
  local outcome, _, _, _, reason = unpack(reply)
  if outcome == 'new' or outcome == 'existing' or CONSUMING[reason] then run('SET', key, '1', 'PX', window) end
  return reply
end

-- Allocates a pod in the usual case. Returns nil, before any write, in any other case.
local function allocate_usual_pod(ARGV)
  local _, call, merchant, lease, life, request_id, stage, pod_attempt, _, previous, signed, reservation, numbers =
    unpack(ARGV)
  if previous and previous ~= '' or signed and signed ~= '' or reservation and reservation ~= '' then return nil end
  local pod, tried = draw_usual_pod(call, merchant, numbers)
  if not pod then return nil end
  local fields = {merchant = merchant, request_id = request_id, stage = stage or '', pod_attempt = pod_attempt or '',
    tried = tried, record = nil, number = nil}
  local pool = allocate_pod(pod, call, fields, now + lease, life)
  if tried == '' and fields.pod_attempt == '' then return {'new', now, pod.name, pool} end
  return {'new', now, pod.name, pool, tried, fields.pod_attempt}
end

operation('allocate', function(ARGV)
  local usual = allocate_usual_pod(ARGV)
  if usual then return usual end
  local request = parse_request(ARGV)
  local reply = request.signed == '' and answer(request) or answer_signed(request)
  local outcome, _, tried, _, reason = unpack(reply)
  if outcome == 'refused' and reason ~= 'waiting' and reason ~= 'unsettled' then
    record_event('refused', request.call, '', '', request.merchant, reason .. (tried == '' and '' or ' ' .. tried))
  end
  return reply
end)
