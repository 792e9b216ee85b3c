-- Records the dials that wait for a pod at a router, and removes expired reports. A report is in force for
-- WAITING_DIALS_TTL, so that a router that dies stops counting.
-- ARGV[2]: router; then merchant, number ('-' for none) and number of dials of each of its queues
-- Replies: {reported, now}   {lost, now}: the store is empty
local FIRST_QUEUE = 3

operation('report_waiting_dials', function(ARGV)
  local _, router = unpack(ARGV)
  local key = K.waiting_dials
  if not has_tiers() then return {'lost', now} end
  local fields = run_index('HGETALL', key)
  for i = 1, #fields, 2 do
    local ends = tonumber(string.match(fields[i + 1], '^%d+')) or 0
    if not outbound.is_in_force(ends) then run('HDEL', key, fields[i]) end
  end
  if #ARGV < FIRST_QUEUE then
    run('HDEL', key, router)
  else
    local ends = text_of(now + RULES.WAITING_DIALS_TTL)
    run('HSET', key, router, ends .. ' ' .. table.concat(ARGV, ' ', FIRST_QUEUE))
    run('PEXPIRE', key, text_of(RULES.WAITING_DIALS_TTL))
  end
  return {'reported', now}
end)
