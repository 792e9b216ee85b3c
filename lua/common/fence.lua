-- fence: refuses the writes of a leader that has been replaced.

-- What a leader of an epoch is told that is not the latest; nil if it is. `epoch` is
-- empty for a writer without a lease.
local function fence(epoch)
  if epoch == '' then return nil end
  local current = try('GET', P .. 'leader:epoch')
  -- What is no number is nobody's.
  current = type(current) == 'string' and tonumber(current) or 0
  if tonumber(epoch) < current then return {'fenced', now, current} end
  if tonumber(epoch) > current then
    run('SET', P .. 'leader:epoch', epoch)
    tell('leader', '', '', '', '', epoch)
  end
end
