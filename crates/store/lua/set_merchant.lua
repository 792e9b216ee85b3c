-- Writes a merchant's document, or takes it away.
-- ARGV[2..5]: merchant, document ('' for none), '=' and the document that it replaces ('' for any), who asks
-- Replies: {set, now}   {changed, now}: it is another document already
operation('set_merchant', {}, function(ARGV)
  local merchant, document, instead_of, by, key = ARGV[2], ARGV[3], ARGV[4], ARGV[5], P .. 'merchant:config'
  local before = read('HGET', key, merchant)
  if document == (before or '') and (document ~= '' or not before) then return {'set', now} end
  if instead_of ~= '' and instead_of ~= '=' .. (before or '') then return {'changed', now} end
  if document == '' then
    run('HDEL', key, merchant)
    tell('merchant_deleted', '', '', '', merchant, by)
  else
    run('HSET', key, merchant, document)
    tell('merchant_set', '', '', '', merchant, by)
  end
  return {'set', now}
end)
