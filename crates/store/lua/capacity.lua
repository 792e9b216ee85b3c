-- Returns the capacity decisions in force, and the prescale orders.
-- Replies: {capacity, now, holder, epoch, end of its lease (ms), decisions, {orders}}
operation('capacity', function(ARGV)
  local lead = capacity_lead()
  local decisions = try('HGET', K.capacity, 'decisions')
  if type(decisions) ~= 'string' then decisions = '' end
  return {'capacity', now, lead.holder, lead.epoch, lead.ends, decisions, prescale_orders()}
end)
