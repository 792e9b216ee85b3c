-- Extends the deadlines of pending calls after an outage, one page per step: provisional and handed-off calls, and
-- waiting calls. The first step of a pass fixes the bound. A call that a step extends leaves the range of the pass, so
-- that the pass ends whatever the latency and the number of calls.
-- ARGV[2..7]: index (calls, waiting), bound (ms; '' in the first step), time from now (ms; sets the bound), page size,
--   deadline and call of the last entry that stayed in range ('' at first)
-- Replies: {extended, now, bound, is done (1, 0), deadline and call to continue after}
operation('extend_pending', function(ARGV)
  local _, index, bound, time, page_size, after, last = unpack(ARGV)
  bound = bound ~= '' and tonumber(bound) or now + tonumber(time)
  page_size = tonumber(page_size)
  local key = P .. index
  -- An index of the wrong type has no calls to extend; the audit replaces it.
  if count('ZCARD', key) == 0 then return {'extended', now, text_of(bound), 1, '', ''} end

  local function extend_waiting(call)
    local entry = queue_entry_of(call)
    if not (entry and entry.is_waiting) then return false end
    if set_poll_by(call, entry, bound) then hand_off_requeued({{call = call, score = tonumber(entry.score)}}) end
    return true
  end

  local function extend_call(call)
    local pod_name, stage, merchant = fields_of(call, 'pod_name', 'stage', 'merchant_id')
    if (stage or '') == '' then return false end
    local pod = readable_facts_of(pod_name)
    set_deadline(pod, call, bound, nil, merchant)
    if pod then place_calls(pod) end
    return true
  end

  local from = 0
  if after ~= '' then
    -- The last entry may have moved or ended since; entries of the same deadline are then read again.
    local rank = run('ZSCORE', key, last) == after and run('ZRANK', key, last)
    from = rank and rank + 1 or run('ZCOUNT', key, '-inf', '(' .. after)
  end
  local page = run('ZRANGE', key, from, from + page_size - 1, 'WITHSCORES')
  for i = 1, #page, 2 do
    local call, deadline = page[i], page[i + 1]
    if tonumber(deadline) >= bound then return {'extended', now, text_of(bound), 1, '', ''} end
    local is_done, is_extended = pcall(index == 'waiting' and extend_waiting or extend_call, call)
    if not (is_done and is_extended) then after, last = deadline, call end
  end
  return {'extended', now, text_of(bound), #page < 2 * page_size and 1 or 0, after, last}
end)
