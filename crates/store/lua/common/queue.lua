-- queue: calls that wait for a pod, in one queue per pool. A pod that becomes free
-- goes to the first who may use it, in the same step.

-- Takes a call out of all queues but one, out of which it was taken before. `pools`
-- are the tiers it waits for.
local function unqueue(call, merchant, pools, but)
  view('ZREM', K.waiting, call)
  for tier in string.gmatch(pools, '%S+') do
    if tier ~= but then view('ZREM', names_of(tier).queue, call) end
  end
  if merchant ~= '' then view('ZREM', K.merchant .. merchant .. ':waiting', call) end
end

-- Puts a call into the queues of its pools, by the score of its turn.
local function enqueue(call, merchant, pools, score, poll_by)
  view('ZADD', K.waiting, poll_by, call)
  for tier in string.gmatch(pools, '%S+') do
    view('SADD', K.pools, tier)
    view('ZADD', names_of(tier).queue, score, call)
    run('PEXPIRE', names_of(tier).queue, RULES.QUEUE_TTL)
  end
  if merchant ~= '' then
    view('ZADD', K.merchant .. merchant .. ':waiting', poll_by, call)
    run('PEXPIRE', K.merchant .. merchant .. ':waiting', RULES.QUEUE_TTL)
    view('ZADD', live_key(merchant), poll_by, call)
  end
  run('HSET', K.tiers, ':waiting', '1')
  is_waited_for = true
end

-- The place of a call that waits, or was handed a pod and has not come for it: its
-- record, which names no pod while it waits.
local function place_of(call)
  local merchant, pools, score, since, ends, tried, attempts, poll_by, stage = fields_of(call,
    'merchant_id', 'pools', 'score', 'since', 'until', 'tried', 'attempts', 'poll_by', 'stage')
  since, ends, poll_by = tonumber(since or ''), tonumber(ends or ''), tonumber(poll_by or '')
  -- A record with malformed fields, edited by hand, is no place.
  if not pools or not tonumber(score or '') or not since or not ends or not poll_by then return nil end
  if stage ~= 'waiting' and stage ~= 'handed' then return nil end
  return {merchant = merchant or '', pools = pools, score = score, since = since, ends = ends, tried = tried or '',
    attempts = attempts or '', poll_by = poll_by, waits = stage == 'waiting'}
end

-- Writes the record of a call that waits.
local function set_place(call, place)
  run('HSET', K.call .. call, 'stage', 'waiting', 'merchant_id', place.merchant, 'pools', place.pools,
    'score', place.score, 'since', place.since, 'until', place.ends, 'tried', place.tried, 'attempts', place.attempts,
    'poll_by', place.poll_by)
  run('PEXPIRE', K.call .. call, max(1, max(place.ends, place.poll_by) - now) + RULES.KEY_SLACK)
  enqueue(call, place.merchant, place.pools, place.score, place.poll_by)
  tell('waiting', call, '', '', place.merchant, place.tried)
end

-- Resets a waiting call whose start lies in the future, after a backward clock step, to wait
-- from now; its time limit stays. Returns whether it did.
local function wait_from_now(call, place)
  local ahead = place.since - now
  if ahead <= 0 then return false end
  place.since, place.ends = now, place.ends - ahead
  run('HSET', K.call .. call, 'since', text_of(now), 'until', text_of(place.ends))
  return true
end

-- When a call that asks now has to ask again: three times it may miss, and once when
-- its time is over.
local function next_poll(ends, patience)
  return math.min(now + patience, ends + floor(patience / 3))
end

-- A call that waits asks again, or is taken to have done so. Answers whether it was
-- missing in a queue: somebody may have deleted it.
local function set_poll_by(call, place, poll_by)
  local missing = 0
  for tier in string.gmatch(place.pools, '%S+') do
    local added = view('ZADD', names_of(tier).queue, place.score, call)
    if added > 0 then run('PEXPIRE', names_of(tier).queue, RULES.QUEUE_TTL) end
    missing = missing + added
  end
  run('HSET', K.call .. call, 'poll_by', poll_by)
  run('PEXPIRE', K.call .. call, max(1, max(place.ends, poll_by) - now) + RULES.KEY_SLACK)
  if view('ZADD', K.waiting, poll_by, call) > 0 then
    missing = missing + 1
    run('HSET', K.tiers, ':waiting', '1')
  end
  if place.merchant ~= '' then
    view('ZADD', K.merchant .. place.merchant .. ':waiting', poll_by, call)
    view('ZADD', live_key(place.merchant), poll_by, call)
  end
  return missing > 0
end

-- A call gives its place up. Answers since when it waited; nil if it did not.
local function leave(call)
  local place = place_of(call)
  if not place or not place.waits then return nil end
  unqueue(call, place.merchant, place.pools)
  if place.merchant ~= '' then view('ZREM', live_key(place.merchant), call) end
  run('DEL', K.call .. call)
  tell('left', call, '', '', place.merchant)
  return place.since
end

-- Hands a pod to a call that waits. Answers whether it had a place.
local function hand(f, call, but)
  local place = place_of(call)
  if not place or not place.waits then return false end
  unqueue(call, place.merchant, place.pools, but)
  -- Until it comes for the pod, what counts is how long it has waited.
  local at, pool = text_of(floor(place.since / 1000)), names_of(f.tier).source
  extend(f, call, place.poll_by, nil, place.merchant)
  run('HSET', K.call .. call, 'pod_name', f.pod, 'source_pool', pool, 'allocated_at', at, 'at', place.since,
    'stage', 'handed')
  tell('handed', call, f.pod, pool, place.merchant, place.tried)
  f.calls = f.calls + 1
  if f.calls == 1 then place_calls(f, call, place.poll_by, at, pool) else place_calls(f) end
  -- Long polls of a user that may not publish are answered later.
  redis.pcall('PUBLISH', K.handed, call)
  return true
end

-- Hands a free slot of a pod to the first who waits for it, if there is one.
local function serve_one(f)
  if is_waited_for == nil then read_table(f.tier) end
  if not is_waited_for or f.calls >= cap_of(f) then return false end
  for _ = 1, 16 do
    local first = unpack(try('ZPOPMIN', names_of(f.tier).queue))
    if not first then return false end
    -- A call without a place waits no more: its record was deleted, or has expired.
    if hand(f, first, f.tier) then return true end
  end
  return false
end

local function serve(f)
  while serve_one(f) do end
end

-- Settles and places a pod, and hands what it has free to those who wait for it.
-- `service` says whether more than its calls may have changed.
local function resettle(f, service)
  local placed = settle(f) or service
  if placed then place(f) end
  if f.left and not placed then f.stands = true end
  while serve_one(f) do placed, f.stands = true, nil end
  f.stands = nil
  if not placed then place_calls(f) end
end

-- Takes a handed-off call back from its pod: it has its old place in the queues again. `f` is the pod, nil if it is
-- unknown. Answers the place; nil for any other call.
local function requeue(f, call, record)
  local place = record.stage == 'handed' and place_of(call)
  if not place then return nil end
  read_table(f and f.tier)
  -- The deadline may have been extended since.
  place.poll_by = tonumber(view('ZSCORE', K.calls, call) or now)
  view('ZREM', K.calls, call)
  if f then f.calls = f.calls - run('ZREM', f.calls_key, call) end
  end_call(f, call, record, 'pod_gone')
  set_place(call, place)
  return place
end

-- Ends all calls of a pod: call, source pool and how long it lasted, of each. Handed-off calls
-- are requeued instead, and are the second part of the answer.
local function end_calls(f)
  local ended, seatless = {}, {}
  local calls = run('ZRANGE', f.calls_key, 0, -1)
  table.sort(calls)
  for _, call in ipairs(calls) do
    local record = record_of(call)
    local place = requeue(f, call, record)
    if place then
      seatless[#seatless + 1] = {call = call, score = tonumber(place.score)}
    else
      view('ZREM', K.calls, call)
      run('ZREM', f.calls_key, call)
      f.calls = f.calls - 1
      end_call(f, call, record, 'pod_gone')
      for _, value in ipairs({call, pool_text(record.source_pool, f.tier), lasted(record.at)}) do
        ended[#ended + 1] = value
      end
    end
  end
  return ended, seatless
end
