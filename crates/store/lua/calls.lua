-- Some calls, by deadline: those with a pod, or those that wait.
-- ARGV[2..8]: waiting (1, 0), source pool, merchant, pod ('' for any of each), after which deadline and call ('' for the
--   first), at most so many
-- Replies: {calls, now, deadline and call of the last one looked at ('' and '' if there are no more), {row, ...}},
--   rows as in call_row.lua
operation('calls', function(ARGV)
  local waiting, pool, merchant, pod = ARGV[2] == '1', ARGV[3], ARGV[4], ARGV[5]
  local after, last, most = ARGV[6], ARGV[7], tonumber(ARGV[8])
  local key = P .. (waiting and 'waiting' or pod ~= '' and 'pod:calls:' .. pod or 'calls')
  if merchant ~= '' and pod == '' then key = live_key(merchant) end
  local from = 0
  if after ~= '' then
    -- It may have moved on, or gone; what comes after it is still there.
    local rank = read('ZSCORE', key, last) == after and run('ZRANK', key, last)
    from = rank and rank + 1 or read('ZCOUNT', key, '-inf', '(' .. after)
  end
  local rows = {}
  local found = read('ZRANGE', key, from, from + most - 1, 'WITHSCORES')
  for i = 1, #found, 2 do
    local call, score = found[i], found[i + 1]
    local is_new = after == '' or tonumber(score) > tonumber(after) or call > last
    local readable, row = pcall(call_row, call, score)
    row = is_new and readable and row
    local is_waiting = row and row[2] == ''
    if row and is_waiting == waiting and (waiting or pool == '' or row[3] == pool)
      and (merchant == '' or row[is_waiting and 3 or 4] == merchant) then
      rows[#rows + 1] = row
    end
  end
  if #found < 2 * most then return {'calls', now, '', '', rows} end
  return {'calls', now, found[#found], found[#found - 1], rows}
end)
