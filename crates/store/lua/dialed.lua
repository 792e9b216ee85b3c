-- Ties a reservation to the provider's call. It expires a lifetime after the first report of the dial.
-- ARGV[2..4]: reservation, call, lifetime (ms)
-- Replies: {dialed, now, deadline}   {not_found, now}
--          {other_reservation, now, id}: the call is the dial of another outstanding reservation
--          {in_progress, now}: the call is live or waits
operation('dialed', function(ARGV)
  local _, id, call, lifetime = unpack(ARGV)
  local facts = outbound.outstanding(id)
  if not facts then return {'not_found', now} end
  if facts.call == call then return {'dialed', now, text_of(facts.ends)} end
  local owner = try('GET', K.dial .. call)
  local other = type(owner) == 'string' and outbound.outstanding(owner)
  if other and other.call == call then return {'other_reservation', now, owner} end
  if run('EXISTS', K.call .. call) == 1 then return {'in_progress', now} end
  if facts.call ~= '' and try('GET', K.dial .. facts.call) == id then
    run('DEL', K.dial .. facts.call)
  end
  facts.call, facts.ends = call, now + tonumber(lifetime)
  local deadline = text_of(facts.ends)
  outbound.set(facts)
  run('SET', K.dial .. call, id, 'PX', text_of(tonumber(lifetime) + RULES.KEY_SLACK))
  run_index('ZADD', K.reservations, deadline, id)
  run_index('ZADD', dials_key(facts.merchant), deadline, id)
  record_event('dialed', call, '', pool_keys_of(facts.tier).source, facts.merchant, id)
  return {'dialed', now, deadline}
end)
