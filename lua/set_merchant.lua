-- Writes a merchant's document, or takes it away.
-- ARGV[2..3]: merchant, document ('' for none)
-- Replies: {set, now}
operation('set_merchant', {}, function(ARGV)
  local merchant, document, key = ARGV[2], ARGV[3], P .. 'merchant:config'
  local before = read('HGET', key, merchant) or ''
  if document == before then return {'set', now} end
  if document == '' then
    run('HDEL', key, merchant)
    tell('merchant_deleted', '', '', '', merchant)
  else
    run('HSET', key, merchant, document)
    tell('merchant_set', '', '', '', merchant)
  end
  return {'set', now}
end)
