-- Records the capacity decisions and learned states of the router that takes the decisions. A writer of a higher epoch
-- replaces another one at once; one of the same epoch waits for the end of the lease.
-- ARGV[2..7]: origin, epoch, holder, lease (ms), decisions, number of states; then each pool with its state, then each
--   pool with the detail of its event
-- Replies: {updated, now, {orders}}   {held, now, holder}   {fenced, now, epoch}   {foreign, now, origin}
local FIRST_STATE = 8

operation('update_capacity', function(ARGV)
  local _, origin, epoch, holder, lease, decisions, states = unpack(ARGV, 1, 7)
  local refused = fence(origin, epoch)
  if refused then return refused end
  local lead = capacity_lead()
  if lead.err then run('DEL', K.capacity) end
  -- A longer lease is left from before the clock was set back.
  local is_leased = now < lead.ends and lead.ends <= now + RULES.MAX_CAPACITY_LEASE
  if lead.holder ~= holder and lead.epoch >= tonumber(epoch) and is_leased then
    return {'held', now, lead.holder}
  end
  run('HSET', K.capacity, 'holder', holder, 'epoch', epoch, 'until',
    text_of(now + math.min(tonumber(lease), RULES.MAX_CAPACITY_LEASE)),
    'decisions', decisions)
  local first_event = FIRST_STATE + 2 * tonumber(states)
  for i = FIRST_STATE, first_event - 1, 2 do
    run('SET', K.capacity_state .. ARGV[i], ARGV[i + 1], 'PX', RULES.CAPACITY_STATE_TTL)
  end
  for i = first_event, #ARGV, 2 do record_event('desired', '', '', ARGV[i], '', ARGV[i + 1]) end
  return {'updated', now, prescale_orders()}
end)
