-- Deletes a merchant's document. Runs in a full Redis, because it frees memory.
-- ARGV[2..4]: merchant, '=' and the expected document ('' for any), actor
-- Replies: {deleted, now}   {changed, now}: the document is another one
operation('delete_merchant', function(ARGV)
  local _, merchant, expected, by = unpack(ARGV)
  local key = K.merchant_config
  local current = read('HGET', key, merchant)
  if not current then return {'deleted', now} end
  if expected ~= '' and expected ~= '=' .. current then return {'changed', now} end
  run('HDEL', key, merchant)
  record_event('merchant_deleted', '', '', '', merchant, by)
  return {'deleted', now}
end)
