-- Gives calls that could not tell us of themselves more time: those with a short
-- lease, because their stream has not started yet or they have not come for their
-- pod, and those that wait.
-- ARGV[2..5]: which (calls, waiting), deadline to go on from, most calls, time from now (ms)
-- Replies: {spared, now, deadline to go on from ('' at the end)}
operation('spare', {'allow-oom'}, function(ARGV)
  local until_then = now + tonumber(ARGV[5])
  local due = read('ZRANGEBYSCORE', P .. ARGV[2], ARGV[3], '(' .. format('%.0f', until_then), 'WITHSCORES', 'LIMIT', 0, ARGV[4])
  for i = 1, #due, 2 do
    local call = due[i]
    if ARGV[2] == 'waiting' then
      local place = place_of(call)
      if place and place.waits and set_poll_by(call, place, until_then) then
        reseat({{call = call, score = tonumber(place.score)}})
      end
    else
      local record = record_of(call, 'pod_name', 'stage', 'merchant_id')
      if (record[2] or '') ~= '' then
        local f = readable_facts_of(record[1])
        extend(f, call, until_then, nil, record[3])
        if f then place_calls(f) end
      end
    end
  end
  if #due < 2 * tonumber(ARGV[4]) then return {'spared', now, ''} end
  -- Where all have one deadline, those beyond the first so many go without.
  local last = due[#due]
  return {'spared', now, last == due[2] and '(' .. last or last}
end)
