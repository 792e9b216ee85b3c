-- Deletes a prescale order.
-- ARGV[2..3]: id, actor
-- Replies: {deleted, now}   {not_there, now}: no such order, or it has expired
operation('delete_prescale', function(ARGV)
  local _, id, by = unpack(ARGV)
  local text = try('HGET', K.prescale, id)
  if type(text) ~= 'string' then return {'not_there', now} end
  run('HDEL', K.prescale, id)
  local order = parse_order(text)
  if not order or order.ends <= now then return {'not_there', now} end
  record_event('prescale_deleted', '', '', order.pool, '', order.pods .. ' ' .. by)
  return {'deleted', now}
end)
