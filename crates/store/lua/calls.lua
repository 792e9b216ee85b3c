-- Returns a page of calls by deadline: live calls, or waiting calls.
-- ARGV[2..8]: waiting (1, 0), source pool, merchant, pod ('' for any of each), deadline and call of the page before (''
--   for the first page), page size
-- Replies: {calls, now, deadline and call of the last entry read ('' and '' at the end), {row, ...}}, rows as in
--   call_row.lua
operation('calls', function(ARGV)
  local _, waiting, pool, merchant, pod_name, after, last, page_size = unpack(ARGV)
  local is_waiting = waiting == '1'
  page_size = tonumber(page_size)
  local key = is_waiting and K.waiting or pod_name ~= '' and K.pod_calls .. pod_name or K.calls
  if merchant ~= '' and pod_name == '' then key = live_key(merchant) end
  local from = 0
  if after ~= '' then
    -- The last entry may have moved or ended since; the entries after it are still in order.
    local rank = read('ZSCORE', key, last) == after and run('ZRANK', key, last)
    from = rank and rank + 1 or read('ZCOUNT', key, '-inf', '(' .. after)
  end
  local rows = {}
  local found = read('ZRANGE', key, from, from + page_size - 1, 'WITHSCORES')
  for i = 1, #found, 2 do
    local call, score = found[i], found[i + 1]
    local is_new = after == '' or tonumber(score) > tonumber(after) or call > last
    local is_readable, row, row_pod, row_merchant, row_pool = pcall(call_row, call, score)
    if is_new and is_readable and row and is_waiting == (row_pod == '')
      and (is_waiting or pool == '' or row_pool == pool) and (merchant == '' or row_merchant == merchant) then
      rows[#rows + 1] = row
    end
  end
  if #found < 2 * page_size then return {'calls', now, '', '', rows} end
  return {'calls', now, found[#found], found[#found - 1], rows}
end)
