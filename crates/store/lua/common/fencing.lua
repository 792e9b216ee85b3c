-- fencing: the origin of a store's pods, and the fencing epoch of their writer.

-- Derives the origin of the pods in a store that does not record it: it was deleted, or an earlier version wrote the
-- pods. A list in force names it. A leader of an earlier version left an epoch.
local function derived_origin(epoch)
  local digest = try('HGET', K.pod_list, 'digest')
  if type(digest) == 'string' then return digest == 'simulated' and 'simulated' or 'list' end
  if epoch > 0 then return 'kubernetes' end
  return run('EXISTS', K.pod_metadata) == 1 and 'unknown' or ''
end

-- Returns the origin of the pods in the store ('' for none), the epoch in force, and the recorded origin.
local function ownership()
  local recorded, epoch = unpack(run('MGET', K.origin, K.leader_epoch))
  epoch = tonumber(epoch or 0) or 0
  return recorded or derived_origin(epoch), epoch, recorded
end

-- Returns whether pods of `origin` may be written to a store of `owner`.
local function may_follow(origin, owner)
  -- Simulated agents must not replace pods that may be real.
  if owner == 'unknown' then return origin ~= 'simulated' end
  if owner == '' or origin == owner then return true end
  -- An earlier version recorded neither namespace nor cluster, or no cluster: the first cluster that claims the store
  -- owns its pods.
  local is_partial = owner == 'kubernetes' or string.find(owner, '^kubernetes/[^/]+$') ~= nil
  return is_partial and string.sub(origin, 1, #owner + 1) == owner .. '/'
end

-- Returns whether calls may be served from the pods of `owner`. A router that has not identified its cluster yet serves
-- the namespace of its name, and writes no pods.
local function may_serve(origin, owner)
  return may_follow(origin, owner) or string.sub(owner, 1, #origin + 1) == origin .. '/'
end

local function adopt_writer(origin, epoch)
  local _, current, recorded = ownership()
  if recorded ~= origin then
    run('SET', K.origin, origin)
    record_event('origin', '', '', '', '', origin)
  end
  if epoch > current then
    run('SET', K.leader_epoch, text_of(epoch))
    record_event('leader', '', '', '', '', text_of(epoch))
  end
end

-- Refuses another origin and a smaller epoch; adopts a first origin and a larger epoch. Returns the refusal, if any.
local function fence(origin, epoch)
  local owner, current, recorded = ownership()
  epoch = tonumber(epoch)
  if not may_follow(origin, owner) then return {'foreign', now, owner} end
  if epoch < current then return {'fenced', now, current} end
  if recorded ~= origin or epoch > current then adopt_writer(origin, epoch) end
end
