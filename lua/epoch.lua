-- The epoch of the leader's writes. A larger one is adopted: from then on the
-- writes of those before are refused.
-- ARGV[2]: epoch, '' to ask only
-- Replies: {epoch, now, epoch}   {fenced, now, epoch}
operation('epoch', {'allow-oom'}, function(ARGV)
  local refused = fence(ARGV[2])
  if refused then return refused end
  local current = try('GET', P .. 'leader:epoch')
  return {'epoch', now, type(current) == 'string' and tonumber(current) or 0}
end)
