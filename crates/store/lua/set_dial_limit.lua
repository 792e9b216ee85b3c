-- Sets or deletes the limit of lines of a number, or the rate limit of an account.
-- ARGV[2..5]: kind (number, account), name, limit ('' to delete it), actor
-- Replies: {set, now, had it a limit (1, 0)}   {lost, now}: the store is empty
operation('set_dial_limit', function(ARGV)
  local _, kind, name, limit, by = unpack(ARGV)
  if not is_set_up() then return {'lost', now} end
  local key = kind == 'number' and K.numbers or K.accounts
  local known = read('HGET', key, name)
  if (known or '') ~= limit then
    if limit ~= '' then
      run('HSET', key, name, limit)
      record_event(kind .. '_set', '', '', '', '', name .. ' ' .. limit .. ' ' .. by)
    else
      run('HDEL', key, name)
      -- The time of the last dial stays: another limit counts from it.
      record_event(kind .. '_deleted', '', '', '', '', name .. ' ' .. by)
    end
    -- The flag tells allocations whether to look for the number of a call.
    if kind == 'number' then
      if run('HLEN', key) > 0 then run('HSET', K.tiers, ':numbers', '1') else run('HDEL', K.tiers, ':numbers') end
    end
  end
  return {'set', now, known and 1 or 0}
end)
