-- Where a call is, since when, and why there.
-- ARGV[2]: call
-- Replies: {call, now, pod, source pool, merchant, at, deadline, tried, stage, number of the attempt}   {not_found, now}
--          {waiting, now, merchant, since, until, poll by, tried}
operation('call', {'no-writes'}, function(ARGV)
  local record = read('HMGET', P .. 'call:' .. ARGV[2], 'pod_name', 'source_pool', 'merchant_id', 'at', 'tried', 'stage', 'attempts')
  if not record[1] then
    local place = place_of(ARGV[2])
    if not place then return {'not_found', now} end
    return {'waiting', now, place.merchant, place.since, place.ends, place.poll_by, place.tried}
  end
  local deadline = read('ZSCORE', P .. 'calls', ARGV[2]) or '0'
  return {'call', now, record[1], pool_text(record[2]), record[3] or '', tostring(tonumber(record[4]) or 0), deadline, record[5] or '',
    record[6] or '', tonumber(record[7] or 0) or 0}
end)
