-- queue: waiting calls, in one queue per pool. A pod that becomes free is handed off to the first waiting call that may
-- use it, in the same step.

-- Removes a call from the queues of its pools (`tiers`), except the one from which the caller has removed it.
local function remove_from_queues(call, merchant, tiers, except_tier)
  run_index('ZREM', K.waiting, call)
  for tier in string.gmatch(tiers, '%S+') do
    if tier ~= except_tier then run_index('ZREM', pool_keys_of(tier).queue, call) end
  end
  if merchant ~= '' then run_index('ZREM', waiting_key(merchant), call) end
end

-- Inserts a call into the queues of its pools; the score is its turn.
local function insert_into_queues(call, merchant, tiers, score, poll_by)
  run_index('ZADD', K.waiting, poll_by, call)
  for tier in string.gmatch(tiers, '%S+') do
    run_index('SADD', K.pools, tier)
    run_index('ZADD', pool_keys_of(tier).queue, score, call)
    run('PEXPIRE', pool_keys_of(tier).queue, RULES.QUEUE_TTL)
  end
  if merchant ~= '' then
    run_index('ZADD', waiting_key(merchant), poll_by, call)
    run('PEXPIRE', waiting_key(merchant), RULES.QUEUE_TTL)
    run_index('ZADD', live_key(merchant), poll_by, call)
  end
  run('HSET', K.tiers, ':waiting', '1')
  has_waiting_calls = true
end

-- Returns the queue entry of a waiting or handed-off call, from its record; nil for any other call. The record of a
-- waiting call names no pod.
local function queue_entry_of(call)
  local merchant, pools, score, since, ends, tried, poll_by, stage, number = fields_of(call,
    'merchant_id', 'pools', 'score', 'since', 'until', 'tried', 'poll_by', 'stage', 'number')
  since, ends, poll_by = tonumber(since or ''), tonumber(ends or ''), tonumber(poll_by or '')
  -- Fields that were malformed by hand are no queue entry.
  if not pools or not tonumber(score or '') or not since or not ends or not poll_by then return nil end
  if stage ~= 'waiting' and stage ~= 'handed' then return nil end
  return {merchant = merchant or '', pools = pools, score = score, since = since, ends = ends, tried = tried or '',
    poll_by = poll_by, number = number or '', is_waiting = stage == 'waiting'}
end

-- Writes the record of a waiting call and inserts it into the queues.
local function set_queue_entry(call, entry, pod_attempt)
  run('HSET', K.call .. call, 'stage', 'waiting', 'merchant_id', entry.merchant, 'pools', entry.pools,
    'score', entry.score, 'since', entry.since, 'until', entry.ends, 'tried', entry.tried,
    POD_ATTEMPT, pod_attempt, 'poll_by', entry.poll_by)
  if entry.number ~= '' then
    run('HSET', K.call .. call, 'number', entry.number)
    outbound.take_line(entry.number, 'call:' .. call)
  end
  run('PEXPIRE', K.call .. call, max(1, max(entry.ends, entry.poll_by) - now) + RULES.KEY_SLACK)
  insert_into_queues(call, entry.merchant, entry.pools, entry.score, entry.poll_by)
  record_event('waiting', call, '', '', entry.merchant, entry.tried)
end

-- Resets a waiting call whose start lies in the future, after a backward clock step, to wait from now; its hold time
-- stays. Returns whether it did.
local function reset_wait_start(call, entry)
  local ahead = entry.since - now
  if ahead <= 0 then return false end
  entry.since, entry.ends = now, entry.ends - ahead
  run('HSET', K.call .. call, 'since', text_of(now), 'until', text_of(entry.ends))
  return true
end

-- Returns the poll deadline of a call that polls now. A third of the poll timeout remains after its hold time for the
-- poll that learns of the end.
local function next_poll_deadline(ends, poll_timeout)
  return math.min(now + poll_timeout, ends + floor(poll_timeout / 3))
end

-- Sets the poll deadline of a waiting call. Returns whether the call was missing in an index, which may have been
-- deleted by hand.
local function set_poll_by(call, entry, poll_by)
  local missing = 0
  for tier in string.gmatch(entry.pools, '%S+') do
    local added = run_index('ZADD', pool_keys_of(tier).queue, entry.score, call)
    if added > 0 then run('PEXPIRE', pool_keys_of(tier).queue, RULES.QUEUE_TTL) end
    missing = missing + added
  end
  run('HSET', K.call .. call, 'poll_by', poll_by)
  run('PEXPIRE', K.call .. call, max(1, max(entry.ends, poll_by) - now) + RULES.KEY_SLACK)
  if run_index('ZADD', K.waiting, poll_by, call) > 0 then
    missing = missing + 1
    run('HSET', K.tiers, ':waiting', '1')
  end
  if entry.merchant ~= '' then
    run_index('ZADD', waiting_key(entry.merchant), poll_by, call)
    run_index('ZADD', live_key(entry.merchant), poll_by, call)
  end
  return missing > 0
end

-- Ends a waiting call. Returns the start of its wait; nil if it does not wait.
local function leave_queue(call)
  local entry = queue_entry_of(call)
  if not entry or not entry.is_waiting then return nil end
  remove_from_queues(call, entry.merchant, entry.pools)
  if entry.merchant ~= '' then run_index('ZREM', live_key(entry.merchant), call) end
  outbound.free_line(entry.number, 'call:' .. call)
  run('DEL', K.call .. call)
  record_event('left', call, '', '', entry.merchant)
  return entry.since
end

-- Hands a pod off to a waiting call. Returns whether the call waits.
local function hand_off(pod, call, except_tier)
  local entry = queue_entry_of(call)
  if not entry or not entry.is_waiting then return false end
  remove_from_queues(call, entry.merchant, entry.pools, except_tier)
  -- The call counts from the start of its wait until it accepts the hand-off.
  local at, pool = text_of(floor(entry.since / 1000)), pool_keys_of(pod.tier).source
  set_deadline(pod, call, entry.poll_by, nil, entry.merchant)
  run('HSET', K.call .. call, 'pod_name', pod.name, 'source_pool', pool, 'allocated_at', at, 'at', entry.since,
    'stage', 'handed')
  record_event('handed', call, pod.name, pool, entry.merchant, entry.tried)
  pod.calls = pod.calls + 1
  if pod.calls == 1 then place_calls(pod, call, entry.poll_by, at, pool) else place_calls(pod) end
  -- Without the permission to publish, long polls notice the hand-off by polling.
  redis.pcall('PUBLISH', K.handed, call)
  return true
end

-- Hands a free slot of a pod off to the first call in its pool's queue. Returns whether it did.
local function hand_off_slot(pod)
  if has_waiting_calls == nil then read_table(pod.tier) end
  if not has_waiting_calls or pod.calls >= cap_of(pod) then return false end
  -- The indexes do not contain the slot of a call that has just ended.
  if not outbound.is_open(pod.tier, pod.keeps_count and 1 or 0) then
    local first, score = unpack(try('ZRANGE', pool_keys_of(pod.tier).queue, 0, 0, 'WITHSCORES'))
    if not first or not outbound.is_dialed(score) then return false end
  end
  for _ = 1, 16 do
    local first = unpack(try('ZPOPMIN', pool_keys_of(pod.tier).queue))
    if not first then return false end
    -- An entry without a record is stale: the record was deleted, or has expired.
    if hand_off(pod, first, pod.tier) then return true end
  end
  return false
end

local function hand_off_free_slots(pod)
  while hand_off_slot(pod) do end
end

-- Assigns a pool, derives the indexes, and hands free slots off to waiting calls. `service_changed` tells whether more
-- than the pod's calls has changed.
local function reassign_and_hand_off(pod, service_changed)
  local is_placed = assign_pool(pod) or service_changed
  if is_placed then place(pod) end
  if pod.has_lost_call and not is_placed then pod.keeps_count = true end
  while hand_off_slot(pod) do is_placed, pod.keeps_count = true, nil end
  pod.keeps_count = nil
  if not is_placed then place_calls(pod) end
end

-- Takes a handed-off call back from its pod and restores its queue entry. `pod` is nil for an unknown pod. Returns the
-- entry; nil for any other call.
local function requeue(pod, call, record)
  local entry = record.stage == 'handed' and queue_entry_of(call)
  if not entry then return nil end
  read_table(pod and pod.tier)
  -- The deadline may have been extended since the hand-off.
  entry.poll_by = tonumber(run_index('ZSCORE', K.calls, call) or now)
  run_index('ZREM', K.calls, call)
  if pod then pod.calls = pod.calls - run('ZREM', pod.calls_key, call) end
  end_call(pod, call, record, 'pod_gone')
  set_queue_entry(call, entry, record.pod_attempt)
  return entry
end

-- Ends all calls of a pod. Returns {call, source pool, duration (ms), ...}, and the handed-off calls, which are
-- requeued instead.
local function end_calls(pod)
  local ended, requeued = {}, {}
  local calls = run('ZRANGE', pod.calls_key, 0, -1)
  table.sort(calls)
  for _, call in ipairs(calls) do
    local record = record_of(call)
    local entry = requeue(pod, call, record)
    if entry then
      requeued[#requeued + 1] = {call = call, score = tonumber(entry.score)}
    else
      run_index('ZREM', K.calls, call)
      run('ZREM', pod.calls_key, call)
      pod.calls = pod.calls - 1
      end_call(pod, call, record, 'pod_gone')
      for _, value in ipairs({call, pool_text(record.source_pool, pod.tier), lasted(record.at)}) do
        ended[#ended + 1] = value
      end
    end
  end
  return ended, requeued
end
