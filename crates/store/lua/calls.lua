-- Some calls, by deadline: those with a pod, or those that wait.
-- ARGV[2..8]: waiting (1, 0), source pool, merchant, pod ('' for any of each), after which deadline and call ('' for
--   the first), page size
-- Replies: {calls, now, deadline and call of the last one looked at ('' and '' if there are no more), {row, ...}},
--   rows as in call_row.lua
operation('calls', function(ARGV)
  local _, waiting, pool, merchant, pod, after, last, most = unpack(ARGV)
  waiting, most = waiting == '1', tonumber(most)
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
    local readable, row, pod_name, merchant_id, source_pool = pcall(call_row, call, score)
    if is_new and readable and row and waiting == (pod_name == '')
      and (waiting or pool == '' or source_pool == pool) and (merchant == '' or merchant_id == merchant) then
      rows[#rows + 1] = row
    end
  end
  if #found < 2 * most then return {'calls', now, '', '', rows} end
  return {'calls', now, found[#found], found[#found - 1], rows}
end)
