-- Writes a merchant's document.
-- ARGV[2..5]: merchant, document, '=' and the expected document ('' for any), actor
-- Replies: {set, now}   {changed, now}: the document is another one
operation('set_merchant', function(ARGV)
  local _, merchant, document, expected, by = unpack(ARGV)
  local key = K.merchant_config
  local current = read('HGET', key, merchant)
  if document == current then return {'set', now} end
  if expected ~= '' and expected ~= '=' .. (current or '') then return {'changed', now} end
  run('HSET', key, merchant, document)
  record_event('merchant_set', '', '', '', merchant, by)
  return {'set', now}
end)
