-- again: a call that has a pod, was handed one, or waits, asks again.

-- The request of a call, and its record, if there is one. ARGV as in allocate.lua.
local function asked(ARGV)
  local _, call, merchant, lease, life, attempt, stage, attempts, waiting, before, signed = unpack(ARGV)
  local q = {call = call, merchant = merchant, lease = lease, life = life, attempt = attempt, stage = stage or '',
    attempts = attempts or '', tried = '', signed = signed or ''}
  if run('EXISTS', K.call .. call) == 1 then q.record = read_record(call) end
  if waiting and waiting ~= '' then
    local time, patience, most, most_per_merchant = string.match(waiting, '^(%d+) (%d+) (%d+) (%d+)$')
    q.hold_time, q.patience = tonumber(time), tonumber(patience)
    q.most, q.most_per_merchant = tonumber(most), tonumber(most_per_merchant)
  end
  if before and before ~= '' then
    local pod, number, final, retries = string.match(before, '^(%S+) (%d+) (%d) (%d+)$')
    q.after = {pod = pod, attempt = tonumber(number), is_final = final == '1',
      is_last = tonumber(number) > tonumber(retries)}
  end
  return q
end

-- The attempts that may have heard of a call, but for one; nil if that is none of them.
-- The place of the first stays its own, '-' when it is gone: who came after it was not new.
local function without_attempt(attempts, attempt)
  local text = ' ' .. attempts .. ' '
  local from, to = string.find(text, ' ' .. attempt .. ' ', 1, true)
  if not from then return nil end
  local rest = string.match(string.sub(text, 1, from) .. string.sub(text, to + 1), '^ *(.-) *$')
  if rest == '' or rest == '-' then return '' end
  return from == 1 and '- ' .. rest or rest
end

-- What a call that asks again is told; nil if it is a new one.
local told_again
function told_again(q)
  local call, record, stage = q.call, q.record, q.stage
  if not record then return nil end
  local key = K.call .. call
  if record.pod_name then
    local pod, pool = record.pod_name, pool_text(record.source_pool)
    if record.stage == 'handed' then
      local f = facts_of(pod)
      local place = not (f and serving(f)) and requeue(f, call, record_of(call))
      if place then
        -- The pod has left service since the hand-off: another pod, or the old place in the queues.
        if f then resettle(f, false) end
        reseat({{call = call, score = tonumber(place.score)}})
        q.record = read_record(call)
        return told_again(q)
      end
      -- It comes for the pod that it was handed while it waited: its lease begins.
      extend(f, call, now + q.lease, nil, record.merchant_id)
      run('HSET', key, 'allocated_at', seconds, 'at', text_of(now), 'attempt', q.attempt, 'stage', stage)
      run('PEXPIRE', key, q.life)
      if stage ~= '' then run('DEL', K.call_end .. call) end
      if f then place_calls(f) end
      tell('fetched', call, pod, pool, record.merchant_id)
      return {'new', now, pod, pool, record.tried, record.attempts, lasted(record.at), ''}
    end
    -- The same attempt again: its first answer was lost.
    local heard = record.attempt
    if string.find(heard .. ' ', q.attempt .. ' ', 1, true) == 1 then
      return {'new', now, pod, pool, record.tried, record.attempts, '', ''}
    end
    -- One more request that may have been answered: all of them have to be taken back before the call is over. A list
    -- that has become too long counts as answered.
    if heard ~= '' and not without_attempt(heard, q.attempt) then
      run('HSET', key, 'attempt', #heard < 400 and heard .. ' ' .. q.attempt or '')
    end
    if record.stage == 'provisional' and stage == 'provisional' then
      -- A new document has gone out: its stream has its whole time.
      local f = facts_of(pod)
      extend(f, call, now + q.lease, nil, record.merchant_id)
      if f then place_calls(f) end
    end
    return {'existing', now, pod, pool, record.tried, record.attempts}
  end
  local place = record.stage == 'waiting' and place_of(call)
  if not place then return nil end
  wait_from_now(call, place)
  local is_there = false
  for tier in string.gmatch(place.pools, '%S+') do is_there = is_there or kind_of(tier) ~= nil end
  if not is_there then
    if not has_tiers() then return {'lost', now} end
    -- No pool that it waits for is there any more: it begins again.
    leave(call)
    return nil
  end
  if not q.hold_time then return {'refused', now, place.tried, '', 'no_pods'} end
  if now >= place.ends then
    leave(call)
    return {'refused', now, place.tried, '', 'time_over', max(0, now - place.since)}
  end
  if set_poll_by(call, place, next_poll(place.ends, q.patience)) then
    reseat({{call = call, score = tonumber(place.score)}})
  end
  return {'refused', now, place.tried, '', 'waiting', place.ends, 0}
end

-- Ends what a call had whose stream is gone. Answers what it is told, if that is all;
-- else it needs another pod. Notes whether it is known to have had one, and which.
local function leave_pod(q)
  local after, record, call = q.after, q.record or {}, q.call
  if record.pod_name then
    q.is_rescue = true
    local is_that = record.pod_name == after.pod and (tonumber(record.attempts) or 0) == after.attempt
    if not is_that or record.stage == 'handed' then return nil end
    if not after.is_final then return {'refused', now, '', '', 'unsettled'} end
    local f = facts_of(record.pod_name, call)
    end_call(f, call, record, 'broken')
    if f then
      local changed = lasted(record.at) < RULES.EARLY_FAILURE and fared_badly(f)
      if after.is_last then
        resettle(f, changed)
      elseif settle(f) or changed then
        place(f)
      else
        place_calls(f)
      end
    end
    q.before, q.record = f, {}
  elseif record.stage == 'waiting' then
    q.is_rescue = true
    return nil
  else
    local ended = end_of(call)
    q.is_rescue = ended ~= nil
    if ended and (ended.attempts ~= after.attempt or is_final[ended.cause]) then
      return {'refused', now, '', '', 'over'}
    end
    local may_be_explained = ended and ended.cause ~= 'pod_gone'
    if may_be_explained and not after.is_final then return {'refused', now, '', '', 'unsettled'} end
    if ended and ended.cause == 'stream' then
      explain(call, ended, 'broken')
      local f = ended.lasted < RULES.EARLY_FAILURE and facts_of(ended.pod)
      if f and fared_badly(f) then place(f) end
    end
  end
  if after.is_last then return {'refused', now, '', '', 'spent'} end
end

-- Hands the pod that a call has left to others, once it is clear that the call does not need it.
local function hand_on(q)
  local f = q.before and readable_facts_of(q.before.pod)
  if f then serve(f) end
end
