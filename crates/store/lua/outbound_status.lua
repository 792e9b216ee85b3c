-- Returns the outstanding dials of all pools, and the limits of accounts.
-- Replies: {outbound, now, reservations, {tier, held dials probability variance, ...},
--   {account, limit, last grant (ms), ...}}
operation('outbound_status', function(ARGV)
  local function pairs_of(key)
    local fields = try('HGETALL', key)
    return fields.err and {} or fields
  end
  local accounts, limits = {}, pairs_of(K.accounts)
  for i = 1, #limits, 2 do
    local last = try('HGET', K.last_dials, limits[i])
    for _, value in ipairs({limits[i], limits[i + 1], type(last) == 'string' and last or '0'}) do
      accounts[#accounts + 1] = value
    end
  end
  return {'outbound', now, count('ZCARD', K.reservations), pairs_of(K.dials), accounts}
end)
