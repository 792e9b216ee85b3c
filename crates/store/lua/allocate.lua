-- Gives a call a pod, repeats the answer for the pod it has, or queues it.
-- ARGV[2..11]: call, merchant ('' for none), lease (ms), life of the record (ms), attempt, stage ('provisional' if its
--   stream has to start before it is sure, else ''), number of the attempt ('' if not counted), how it may wait
--   ('' or: time, patience, most calls, most of its merchant), the pod before ('' or: pod, number, '1' if that is
--   final, retries), signature of the request ('' or: fingerprint, how long (ms) it is remembered)
-- Replies: {existing, now, pod, source pool, tried, number of the attempt}
--          {new, now, pod, source pool, tried, number of the attempt, how long it waited ('' if it did not), why the
--            merchant's document is malformed}, without empty values at the end
--          {refused, now, tried, why malformed, why refused}: no_pods, max_calls, max_rate, queue_full, over,
--            unsettled, spent, replayed
--          {refused, now, tried, '', time_over, how long it waited}
--          {refused, now, tried, why malformed, waiting, until, is new (1, 0)}
--          {lost, now}: the store is empty   {late, now}

-- The limit that a call of a merchant would exceed; nil if none.
local function exceeded(merchant, wishes)
  if wishes.max_calls then
    local key = live_key(merchant)
    local live = count('ZCARD', key)
    if live >= wishes.max_calls then
      -- Calls whose records someone has deleted by hand are long overdue here.
      try('ZREMRANGEBYSCORE', key, '-inf', now - 60000)
      live = count('ZCARD', key)
    end
    if live >= wishes.max_calls then return 'max_calls' end
  end
  if wishes.max_rate == 0 then return 'max_rate' end
  if wishes.max_rate then
    local nth = try('LINDEX', rate_key(merchant), wishes.max_rate - 1)
    local age = type(nth) == 'string' and now - (tonumber(nth) or 0)
    -- A call of the future was counted before the clock was set back.
    if age and age >= 0 and age < RULES.RATE_WINDOW then return 'max_rate' end
  end
end

-- Counts a call that was let in as one of this second.
local function admit(q, wishes)
  if wishes.max_rate and not q.is_rescue then
    local key = rate_key(q.merchant)
    view('LPUSH', key, now)
    run('LTRIM', key, 0, wishes.max_rate - 1)
    run('PEXPIRE', key, RULES.RATE_WINDOW)
  end
end

-- Walks the chain; the pod found, and what was tried before.
local function walk(steps, avoid)
  local tried = ''
  for _, step in ipairs(steps) do
    local f, reason
    if step.kind then f, reason = draw(step.tier, step.kind, avoid) else reason = 'unknown' end
    if f then return f, tried end
    tried = (tried == '' and '' or tried .. ' ') .. step.step .. '=' .. reason
  end
  if run('EXISTS', K.audit_due) == 1 then
    for _, step in ipairs(steps) do
      local f = step.kind and draw_assigned(step.tier, step.kind, avoid)
      if f then return f, '' end
    end
  end
  return nil, tried
end

-- Whether another call, of this merchant, may wait.
local function may_wait(q)
  local theirs = q.merchant ~= '' and K.merchant .. q.merchant .. ':waiting'
  if theirs and count('ZCARD', theirs) >= q.most_per_merchant then
    -- Those whose records somebody has deleted are long overdue there.
    try('ZREMRANGEBYSCORE', theirs, '-inf', now - 60000)
  end
  return count('ZCARD', K.waiting) < q.most and not (theirs and count('ZCARD', theirs) >= q.most_per_merchant)
end

-- Lets a call wait for any of its pools. Answers until when at most.
local function take_place(q, pools, tried, priority)
  -- Higher priorities first, then who came first. A call that had a pod came before
  -- all who wait.
  local ticket = view('INCR', K.tickets) - (q.is_rescue and RULES.REQUEUE_ADVANTAGE or 0)
  local score = -priority * RULES.PRIORITY_STEP + ticket
  local ends = now + q.hold_time
  set_place(q.call, {merchant = q.merchant, pools = table.concat(pools, ' '), score = score, since = now, ends = ends,
    tried = tried, attempts = q.attempts, poll_by = next_poll(ends, q.patience)})
  return ends
end

-- Gives a call that is new a pod, or a place, or neither.
local function serve_new(q, steps, wishes)
  local f, tried = walk(steps, q.after and q.after.pod)
  if q.after and not f then f, tried = walk(steps) end
  if f then
    admit(q, wishes)
    q.tried = tried
    local pool = give(f, q.call, q, now + q.lease, q.life)
    if q.stage ~= '' then run('DEL', K.call_end .. q.call) end
    if tried == '' and q.attempts == '' and wishes.wrong == '' then return {'new', now, f.pod, pool} end
    return {'new', now, f.pod, pool, tried, q.attempts, '', wishes.wrong}
  end
  local pools = {}
  for _, step in ipairs(steps) do
    if step.tier then pools[#pools + 1] = step.tier end
  end
  if (q.hold_time or 0) == 0 or #pools == 0 then return {'refused', now, tried, wishes.wrong, 'no_pods'} end
  if not may_wait(q) then return {'refused', now, tried, wishes.wrong, 'queue_full'} end
  local ends = take_place(q, pools, tried, wishes.priority)
  admit(q, wishes)
  return {'refused', now, tried, wishes.wrong, 'waiting', ends, 1}
end

-- What a call is told.
local function answer(q)
  local again = q.after and leave_pod(q) or told_again(q)
  if again then return again end
  local tiers_key = K.tiers
  local chain = try('HGET', tiers_key, ':chain')
  -- A table that is missing or of the wrong type is written again by the recovery.
  if type(chain) ~= 'string' then return {'lost', now} end
  local document = q.merchant ~= '' and try('HGET', K.merchant_config, q.merchant)
  local wishes = document and wishes_of(document) or NO_WISHES
  local steps = steps_of(wishes, chain)
  local limit = document and not q.is_rescue and exceeded(q.merchant, wishes)
  if limit then return {'refused', now, '', wishes.wrong, limit} end
  local told = serve_new(q, steps, wishes)
  hand_on(q)
  return told
end

-- Answers after which a signed request gives no pod any more, once the call is over. One that was refused for want
-- of pods has begun nothing, and may be sent again.
local SPENT = {waiting = true, over = true, spent = true}

-- The same for a request that a provider has signed: it is good for one call.
local function answer_signed(q)
  local fingerprint, window = string.match(q.signed, '^(%S+) (%d+)$')
  local key = K.seen .. fingerprint
  if not q.record and run('EXISTS', key) == 1 then return {'refused', now, '', '', 'replayed'} end
  local told = answer(q)
  local outcome, _, _, _, reason = unpack(told)
  if outcome == 'new' or outcome == 'existing' or SPENT[reason] then run('SET', key, '1', 'PX', window) end
  return told
end

operation('allocate', function(ARGV)
  local q = asked(ARGV)
  local told = q.signed == '' and answer(q) or answer_signed(q)
  local outcome, _, tried, _, reason = unpack(told)
  if outcome == 'refused' and reason ~= 'waiting' and reason ~= 'unsettled' then
    tell('refused', q.call, '', '', q.merchant, reason .. (tried == '' and '' or ' ' .. tried))
  end
  return told
end)
