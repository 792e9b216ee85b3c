-- fence: a store has one origin of pods, and within it the writer with the highest epoch.

-- The origin of the pods in the store ('' for none), the epoch in force, and whether the origin is recorded: a store
-- with an epoch and without an origin was written by a leader of an earlier version.
local function ownership()
  local found = run('MGET', P .. 'origin', P .. 'leader:epoch')
  local epoch = tonumber(found[2] or 0) or 0
  return found[1] or epoch > 0 and 'kubernetes' or '', epoch, found[1]
end

-- Whether pods of an origin may be written where the owner has written before.
local function may_follow(origin, owner)
  return owner == '' or origin == owner or owner == 'kubernetes' and string.find(origin, '^kubernetes/') ~= nil
end

local function adopt_writer(origin, epoch)
  local _, current, recorded = ownership()
  if recorded ~= origin then
    run('SET', P .. 'origin', origin)
    tell('origin', '', '', '', '', origin)
  end
  if epoch > current then
    run('SET', P .. 'leader:epoch', text_of(epoch))
    tell('leader', '', '', '', '', text_of(epoch))
  end
end

-- Refuses another origin and a smaller epoch; adopts a first origin and a larger epoch. Answers the refusal, if any.
local function fence(origin, epoch)
  local owner, current, recorded = ownership()
  epoch = tonumber(epoch)
  if not may_follow(origin, owner) then return {'foreign', now, owner} end
  if epoch < current then return {'fenced', now, current} end
  if recorded ~= origin or epoch > current then adopt_writer(origin, epoch) end
end
