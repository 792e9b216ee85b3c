-- capacity: the router that takes the capacity decisions, and prescale orders.

-- Returns the router that takes the decisions, its epoch and the end of its lease. A malformed record, edited by hand,
-- counts as none: the next update replaces it.
local function capacity_lead()
  local reply = try('HMGET', K.capacity, 'holder', 'epoch', 'until')
  local holder, epoch, ends = unpack(reply)
  return {holder = holder or '', epoch = tonumber(epoch or 0) or 0, ends = floor(tonumber(ends or 0) or 0),
    err = reply.err}
end

-- Parses an order: the end (ms), the pods and the pool. Returns nil for a malformed one.
local function parse_order(text)
  local ends, pods, pool = string.match(text, '^(%d+) (%d+) (%S+)$')
  if not ends or not is_pool(pool) then return nil end
  return {ends = tonumber(ends), pods = pods, pool = pool}
end

-- Returns the orders that have not expired: id, pool, pods, end, ... Orders under a key of another type, and malformed
-- ones, count as none.
local function prescale_orders()
  local fields, orders = try('HGETALL', K.prescale), {}
  if fields.err then return orders end
  for i = 1, #fields, 2 do
    local order = parse_order(fields[i + 1])
    if order and order.ends > now then
      orders[#orders + 1] = fields[i]
      orders[#orders + 1] = order.pool
      orders[#orders + 1] = order.pods
      orders[#orders + 1] = text_of(order.ends)
    end
  end
  return orders
end
