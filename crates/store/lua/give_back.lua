-- Gives a reservation back.
-- ARGV[2]: reservation
-- Replies: {given_back, now}   {not_found, now}
operation('give_back', function(ARGV)
  local _, id = unpack(ARGV)
  local facts = outbound.outstanding(id)
  if not facts then return {'not_found', now} end
  outbound.end_reservation(facts, 'given_back')
  return {'given_back', now}
end)
