-- reservations: capacity for dials, from the grant until the dial is answered, has failed, is given back or expires.

-- Parses a reservation; nil for a malformed one.
function outbound.parse(id, text)
  local ends, at, probability, tier, merchant, number, account, call = string.match(
    type(text) == 'string' and text or '', '^(%d+) (%d+) (%d+) (%S+) (%S+) (%S+) (%S+) (%S+)$')
  if not ends then return nil end
  local function given(word) return word ~= '-' and word or '' end
  return {id = id, ends = tonumber(ends), at = tonumber(at), probability = tonumber(probability), tier = tier,
    merchant = merchant, number = given(number), account = given(account), call = given(call)}
end

function outbound.get(id)
  return outbound.parse(id, try('GET', K.reservation .. id))
end

-- Formats a reservation.
local function record_of_reservation(facts)
  local function word(text) return text ~= '' and text or '-' end
  return table.concat({text_of(facts.ends), text_of(facts.at), text_of(facts.probability), facts.tier,
    facts.merchant, word(facts.number), word(facts.account), word(facts.call)}, ' ')
end

-- Writes a reservation and its deadline.
function outbound.set(facts)
  run('SET', K.reservation .. facts.id, record_of_reservation(facts), 'PX',
    text_of(max(1, facts.ends - now) + RULES.KEY_SLACK))
end

-- Returns the reservation of an answer that was refused for lack of a pod, for a repeat of the request; nil if there
-- is none.
function outbound.missed_answer(call, id)
  local text = try('GET', K.missed_answer .. call)
  local known, record = string.match(type(text) == 'string' and text or '', '^(%S+) (.+)$')
  local facts = known == id and outbound.parse(id, record)
  return facts and facts.ends > now and facts or nil
end

-- Keeps the reservation of an answer that was refused for lack of a pod until its deadline.
function outbound.set_missed_answer(call, facts)
  run('SET', K.missed_answer .. call, facts.id .. ' ' .. record_of_reservation(facts), 'PX',
    text_of(max(1, facts.ends - now)))
end

-- Returns a reservation that has not expired; nil if there is none.
function outbound.outstanding(id)
  local facts = outbound.get(id)
  return facts and facts.ends > now and facts or nil
end

-- Whole numbers up to this one are exact in Lua.
local MAX_EXACT = 2 ^ 53

-- Returns the learned answer rate of a merchant: decayed counts of its dials and answers. A malformed one counts as
-- none.
function outbound.answer_rate(merchant)
  local text = try('GET', K.answer_rate .. merchant)
  local dials, answers = string.match(type(text) == 'string' and text or '', '^(%d+) (%d+)$')
  dials, answers = tonumber(dials), tonumber(answers)
  if dials and dials > 0 and dials <= MAX_EXACT and answers <= dials then return dials, answers end
  return ARITHMETIC.first_answer_rate()
end

-- Adds `number` dials of a probability to the sums of a pool, or removes them if it is negative.
function outbound.add(dials, number, probability)
  return {dials = dials.dials + number, probability = dials.probability + number * probability,
    variance = dials.variance + number * probability * (RULES.PROBABILITY_UNIT - probability)}
end

-- Returns the slots held for dials; the target is in millionths.
function outbound.held(dials, target)
  return ARITHMETIC.held_slots(dials.dials, dials.probability, dials.variance, target / RULES.MISS_TARGET_UNIT)
end

-- Writes the dials of a pool, with the slots held for them.
function outbound.set_dials(tier, dials, target)
  if dials.dials <= 0 then
    run_index('HDEL', K.dials, tier)
    return
  end
  local numbers = {outbound.held(dials, target), dials.dials, max(0, dials.probability), max(0, dials.variance)}
  run_index('HSET', K.dials, tier, format('%d %d %d %d', unpack(numbers)))
end

-- Hands free slots of a pool off to waiting calls, after fewer are held for dials.
function outbound.hand_off_pool(tier)
  if has_waiting_calls == nil then tier_entry(merchant_of(tier) or tier) end
  if not has_waiting_calls then return end
  if ordered_merchants == NONE then
    local chain = try('HGET', K.tiers, ':chain')
    if type(chain) == 'string' then ordered_merchants = parse_ordered(chain) end
  end
  local kind, queue = kind_of(tier), pool_keys_of(tier).queue
  while kind do
    local call, score = unpack(try('ZRANGE', queue, 0, 0, 'WITHSCORES'))
    if not call or not outbound.is_dialed(score) and not outbound.is_open(tier) then return end
    local entry = queue_entry_of(call)
    if not entry or not entry.is_waiting then
      -- The record was deleted, or has expired.
      run('ZREM', queue, call)
    else
      local pod = draw(tier, kind)
      if not pod then return end
      hand_off(pod, call)
    end
  end
end

-- Ends a reservation: answered, unanswered, given_back or expired. `call` is the call that used it.
function outbound.finish(facts, cause, call)
  run('DEL', K.reservation .. facts.id)
  run_index('ZREM', K.reservations, facts.id)
  run_index('ZREM', dials_key(facts.merchant), facts.id)
  outbound.free_line(facts.number, facts.id)
  if facts.call ~= '' and try('GET', K.dial .. facts.call) == facts.id then run('DEL', K.dial .. facts.call) end
  local text, target = unpack(try('HMGET', K.dials, facts.tier, ':target'))
  local dials = outbound.add(outbound.parse_dials(text), -1, facts.probability)
  outbound.set_dials(facts.tier, dials, tonumber(target or 0) or 0)
  -- A reservation that was not reported as dialed says nothing about the called person.
  if cause == 'answered' or facts.call ~= '' then
    local ended, answers = outbound.answer_rate(facts.merchant)
    ended, answers = ARITHMETIC.record_dial_ended(ended, answers, cause == 'answered', max(0, dials.dials))
    run('SET', K.answer_rate .. facts.merchant, format('%d %d', ended, answers), 'PX', text_of(RULES.ANSWER_RATE_TTL))
  end
  record_event('reservation_ended', call or facts.call, '', pool_keys_of(facts.tier).source, facts.merchant,
    facts.id .. ' ' .. cause .. ' ' .. text_of(max(0, now - facts.at)))
end

-- Ends a reservation, and hands the slots that are no longer held to waiting calls.
function outbound.end_reservation(facts, cause)
  outbound.finish(facts, cause)
  outbound.hand_off_pool(facts.tier)
end

-- Ends the reservation of a dial whose provider reports the end of the call. Returns whether there was one.
function outbound.end_dial(call)
  local id = try('GET', K.dial .. call)
  local facts = type(id) == 'string' and outbound.get(id)
  if not facts then return false end
  outbound.end_reservation(facts, 'unanswered')
  return true
end
