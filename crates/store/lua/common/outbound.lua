-- outbound: slots that are held for outstanding dials, and the lines of numbers.

-- Functions of outbound calls, in a table: a Lua chunk has at most 200 local names.
local outbound = {}

-- Returns the free slots of the pods in an index of a shared pool, or `enough` or more if there are at least as many.
-- It counts the pods with the same number of calls at once, those with the fewest first; beyond MAX_COUNTED_LOADS
-- different numbers of calls each pod counts as one slot.
local function slots_in_index(key, cap, enough)
  local slots, pods = 0, 0
  for _ = 1, RULES.MAX_COUNTED_LOADS do
    local _, load = unpack(try('ZRANGE', key, text_of(pods), text_of(pods), 'WITHSCORES'))
    local calls = tonumber(load)
    if not calls or calls >= cap then return slots end
    local counted = count('ZCOUNT', key, '-inf', load)
    slots, pods = slots + (counted - pods) * (cap - calls), counted
    if slots >= enough then return slots end
  end
  return slots + count('ZCOUNT', key, '-inf', '(' .. cap) - pods
end

-- Returns the free slots of a pool, or `enough` or more if there are at least as many.
function outbound.counted_slots(tier, kind, enough)
  local keys = pool_keys_of(tier)
  if kind.kind ~= 'shared' then return count('SCARD', keys.available) + count('ZCARD', keys.at_risk) end
  local slots = slots_in_index(keys.available, kind.cap, enough)
  return slots >= enough and enough or slots + slots_in_index(keys.at_risk, kind.cap, enough)
end

-- Parses the dials of a pool: held slots, and the sums over its outstanding dials. A malformed entry counts as none;
-- the audit derives it again.
function outbound.parse_dials(text)
  local held, dials, probability, variance =
    string.match(type(text) == 'string' and text or '', '^(%d+) (%d+) (%d+) (%d+)$')
  return {held = tonumber(held) or 0, dials = tonumber(dials) or 0, probability = tonumber(probability) or 0,
    variance = tonumber(variance) or 0}
end

-- Returns whether a call without a reservation may use a free slot of a pool: more are free than are held for dials.
-- `unplaced` is the number of free slots that the indexes do not contain yet.
function outbound.is_open(tier, unplaced)
  if has_dials == nil then tier_entry(merchant_of(tier) or tier) end
  if not has_dials then return true end
  local held = outbound.parse_dials(try('HGET', K.dials, tier)).held
  if held == 0 then return true end
  local kind = kind_of(tier)
  return kind ~= nil and outbound.counted_slots(tier, kind, held + 1) + (unplaced or 0) > held
end

-- Returns whether the score of a queue entry is that of a call with a reservation, which may use held slots.
function outbound.is_dialed(score)
  return tonumber(score) < -(RULES.MAX_PRIORITY + 0.5) * RULES.PRIORITY_STEP
end

-- Returns how many more calls and dials a merchant may have.
function outbound.calls_room(merchant, max_calls, wanted)
  local calls_key, reservations_key = live_key(merchant), dials_key(merchant)
  local function room()
    local dials = has_dials and count('ZCARD', reservations_key) or 0
    return max(0, max_calls - count('ZCARD', calls_key) - dials)
  end
  local free = room()
  if free >= wanted then return free end
  -- Calls and reservations whose records were deleted by hand are long overdue here.
  for _, key in ipairs({calls_key, reservations_key}) do try('ZREMRANGEBYSCORE', key, '-inf', now - 60000) end
  return room()
end

-- Adds a call (`call:` and its name) or a reservation to the lines of its number. Returns whether it is new.
function outbound.take_line(number, holder)
  if not number or number == '' then return false end
  local key = K.lines .. number
  local added = run_index('SADD', key, holder)
  run('PEXPIRE', key, RULES.LINES_TTL)
  return added == 1
end

function outbound.free_line(number, holder)
  if number and number ~= '' then run_index('SREM', K.lines .. number, holder) end
end

-- Returns the number whose line a new call uses: the first one with a limit. `numbers` are separated by spaces.
function outbound.limited_number(numbers)
  if numbers == '' or not has_numbers then return '' end
  for number in string.gmatch(numbers, '%S+') do
    local limit = try('HGET', K.numbers, number)
    if type(limit) == 'string' then return number end
  end
  return ''
end

-- Returns whether a report of waiting dials that ends at a time is in force. A later end is left from before the clock
-- was set back.
function outbound.is_in_force(ends)
  return now < ends and ends <= now + RULES.WAITING_DIALS_TTL
end

-- Returns whether the holder of a line is still outstanding or not over.
function outbound.uses_line(number, holder)
  local call = string.match(holder, '^call:(.+)$')
  if call then return fields_of(call, 'number') == number end
  return outbound.get(holder) ~= nil
end
