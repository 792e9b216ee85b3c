-- again: a call that has a pod, was handed one, or waits, asks again.

-- The fields of a call's record that decide what a repeated request is answered.
local function record_of_repeat(call)
  return read('HMGET', K.call .. call, 'pod_name', 'source_pool', 'tried', 'attempt', 'stage', 'attempts',
    'merchant_id', 'at')
end

-- What a call asks for, and its record, if there is one. ARGV as in allocate.lua.
local function asked(ARGV)
  local key = K.call .. ARGV[2]
  local q = {call = ARGV[2], merchant = ARGV[3], lease = ARGV[4], life = ARGV[5], attempt = ARGV[6], stage = ARGV[7] or '',
    attempts = ARGV[8] or '', tried = ''}
  if run('EXISTS', key) == 1 then
    q.record = record_of_repeat(ARGV[2])
  end
  if ARGV[9] and ARGV[9] ~= '' then
    local time, patience, most, most_per_merchant = string.match(ARGV[9], '^(%d+) (%d+) (%d+) (%d+)$')
    q.hold_time, q.patience = tonumber(time), tonumber(patience)
    q.most, q.most_per_merchant = tonumber(most), tonumber(most_per_merchant)
  end
  if ARGV[10] and ARGV[10] ~= '' then
    local pod, number, final, retries = string.match(ARGV[10], '^(%S+) (%d+) (%d) (%d+)$')
    q.after = {pod = pod, attempt = tonumber(number), is_final = final == '1', is_last = tonumber(number) > tonumber(retries)}
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
  if record[1] then
    local pool = pool_text(record[2])
    if record[5] == 'handed' then
      local f = facts_of(record[1])
      local place = not (f and serving(f)) and requeue(f, call, record_to_end(call))
      if place then
        -- The pod has left service since the hand-off: another pod, or the old place in the queues.
        if f then resettle(f, false) end
        reseat({{call = call, score = tonumber(place.score)}})
        q.record = record_of_repeat(call)
        return told_again(q)
      end
      -- It comes for the pod that it was handed while it waited: its lease begins.
      extend(f, call, now + q.lease, nil, record[7])
      run('HSET', key, 'allocated_at', seconds, 'at', text_of(now), 'attempt', q.attempt, 'stage', stage)
      run('PEXPIRE', key, q.life)
      if stage ~= '' then run('DEL', K.call_end .. call) end
      if f then place_calls(f) end
      tell('fetched', call, record[1], pool, record[7])
      return {'new', now, record[1], pool, record[3] or '', record[6] or '', lasted(record[8]), ''}
    end
    -- The same attempt again: its first answer was lost.
    local attempts = record[4] or ''
    if string.find(attempts .. ' ', q.attempt .. ' ', 1, true) == 1 then return {'new', now, record[1], pool, record[3] or '', record[6] or '', '', ''} end
    -- One more who may hear of it: all of them have to take it back before it is over.
    -- (Of so many, one has heard.)
    if attempts ~= '' and not without_attempt(attempts, q.attempt) then
      run('HSET', key, 'attempt', #attempts < 400 and attempts .. ' ' .. q.attempt or '')
    end
    if record[5] == 'provisional' and stage == 'provisional' then
      -- A new document has gone out: its stream has its whole time.
      local f = facts_of(record[1])
      extend(f, call, now + q.lease, nil, record[7])
      if f then place_calls(f) end
    end
    return {'existing', now, record[1], pool, record[3] or '', record[6] or ''}
  end
  local place = record[5] == 'waiting' and place_of(call)
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
  if set_poll_by(call, place, next_poll(place.ends, q.patience)) then reseat({{call = call, score = tonumber(place.score)}}) end
  return {'refused', now, place.tried, '', 'waiting', place.ends, 0}
end

-- Ends what a call had whose stream is gone. Answers what it is told, if that is all;
-- else it needs another pod. Notes whether it is known to have had one, and which.
local function leave_pod(q)
  local after, record, call = q.after, q.record or {}, q.call
  if record[1] then
    q.is_rescue = true
    if record[1] ~= after.pod or (tonumber(record[6] or 0) or 0) ~= after.attempt or record[5] == 'handed' then return nil end
    if not after.is_final then return {'refused', now, '', '', 'unsettled'} end
    local f = facts_of(record[1], call)
    end_call(f, call, {pod = record[1], at = record[8], merchant = record[7] or '', stage = record[5] or '',
      attempts = record[6] or ''}, 'broken')
    if f then
      local changed = lasted(record[8]) < RULES.EARLY_FAILURE and fared_badly(f)
      if after.is_last then
        resettle(f, changed)
      elseif settle(f) or changed then
        place(f)
      else
        place_calls(f)
      end
    end
    q.before, q.record = f, {}
  elseif record[5] == 'waiting' then
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
