#!lua flags=no-writes
-- Where a call is, since when, and why there.
-- ARGV[3]: call
-- Replies: {call, now, pod, source pool, merchant, at, deadline, tried, is its stream still to start (1, 0)}   {not_found, now}
-- include: base
local record = read('HMGET', P .. 'call:' .. ARGV[3], 'pod_name', 'source_pool', 'merchant_id', 'at', 'tried', 'provisional')
if not record[1] then return {'not_found', now} end
local deadline = read('ZSCORE', P .. 'calls', ARGV[3]) or '0'
return {'call', now, record[1], pool_text(record[2]), record[3] or '', tostring(tonumber(record[4]) or 0), deadline, record[5] or '',
  record[6] == '1' and 1 or 0}
