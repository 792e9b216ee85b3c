-- Writes a merchant's document.
-- ARGV[2..5]: merchant, document, '=' and the document that it replaces ('' for any), who asks
-- Replies: {set, now}   {changed, now}: it is another document already
operation('set_merchant', function(ARGV)
  local _, merchant, document, instead_of, by = unpack(ARGV)
  local key = K.merchant_config
  local before = read('HGET', key, merchant)
  if document == before then return {'set', now} end
  if instead_of ~= '' and instead_of ~= '=' .. (before or '') then return {'changed', now} end
  run('HSET', key, merchant, document)
  tell('merchant_set', '', '', '', merchant, by)
  return {'set', now}
end)
