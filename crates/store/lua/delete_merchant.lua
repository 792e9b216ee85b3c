-- Takes a merchant's document away. Runs in a full Redis, because it frees memory.
-- ARGV[2..4]: merchant, '=' and the document that it replaces ('' for any), who asks
-- Replies: {deleted, now}   {changed, now}: it is another document already
operation('delete_merchant', function(ARGV)
  local _, merchant, instead_of, by = unpack(ARGV)
  local key = K.merchant_config
  local before = read('HGET', key, merchant)
  if not before then return {'deleted', now} end
  if instead_of ~= '' and instead_of ~= '=' .. before then return {'changed', now} end
  run('HDEL', key, merchant)
  tell('merchant_deleted', '', '', '', merchant, by)
  return {'deleted', now}
end)
