-- Extends the lease of a gateway. Returns its calls with an order for their stream, and the number of its calls: fewer
-- than it relays if the store has lost some.
-- ARGV[2..3]: gateway, lease (ms)
-- Replies: {extended, now, {call, order, …}, calls}   {lost, now}: the store is empty

-- Most orders of one reply; the next heartbeat returns the others.
local LIMIT = 1000

operation('heartbeat', function(ARGV)
  local _, gateway, lease = unpack(ARGV)
  if not has_tiers() then return {'lost', now} end
  set_gateway(gateway, now + tonumber(lease), lease)
  local key, ending = K.gateway .. gateway, {}
  for _, call in ipairs(run_index('ZRANGEBYSCORE', key, '1', '+inf', 'LIMIT', '0', LIMIT)) do
    local attached = stream_of(record_of(call))
    if attached and attached.gateway == gateway then
      ending[#ending + 1] = call
      ending[#ending + 1] = attached.ending
    else
      -- The call ended without this index: its record was deleted, or a router of the previous version ended it.
      run('ZREM', key, call)
    end
  end
  -- Sweeps remove a gateway and its index; expiry does if its entry was deleted by hand.
  run('PEXPIRE', key, RULES.GATEWAY_TTL)
  return {'extended', now, ending, run('ZCARD', key)}
end)
