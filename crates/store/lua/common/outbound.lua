-- outbound: slots that are held for outstanding dials, and the lines of numbers.

-- Functions of outbound calls, in a table: a Lua chunk has at most 200 local names.
local outbound = {}

-- Returns the free slots of the pods in an index of a shared pool. Of one pod at most MAX_COUNTED_SLOTS count: for each
-- level below the cap the pods with at most that many calls, until only pods with all of these slots are left.
local function slots_in_index(key, cap, enough)
  local last = max(0, cap - RULES.MAX_COUNTED_SLOTS)
  local idle = count('ZCOUNT', key, '-inf', text_of(last))
  local slots = 0
  for level = cap - 1, last + 1, -1 do
    if slots + idle * (level - last + 1) >= enough then return enough end
    local pods = count('ZCOUNT', key, '-inf', text_of(level))
    if pods == idle then return slots + idle * (level - last + 1) end
    slots = slots + pods
  end
  return slots + idle
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
