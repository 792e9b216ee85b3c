-- Extends the lease of a gateway. Returns its calls with an order for their stream, the number of its calls, and those
-- of the given calls that are not among them: the store has lost them.
-- ARGV[2..3]: gateway, lease (ms); then calls that the gateway relays, some of all
-- Replies: {extended, now, {call, order, …}, calls, {unknown calls}}   {lost, now}: the store is empty
local FIRST_CALL = 4

-- Most orders of one reply; the next heartbeat returns the others.
local LIMIT = 1000

operation('heartbeat', function(ARGV)
  local _, gateway, lease = unpack(ARGV, 1, 3)
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
  local unknown = {}
  for i = FIRST_CALL, #ARGV do
    if not run('ZSCORE', key, ARGV[i]) then unknown[#unknown + 1] = ARGV[i] end
  end
  -- Sweeps remove a gateway and its index; expiry does if its entry was deleted by hand.
  run('PEXPIRE', key, RULES.GATEWAY_TTL)
  return {'extended', now, ending, run('ZCARD', key), unknown}
end)
