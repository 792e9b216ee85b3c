-- Claims the pods of the store for an origin. A leader presents the epoch of its Lease. Replicas with a list of pods
-- share an epoch while their lists are the same; a list that was just read replaces another one, and so does any list
-- after LIST_TTL without a claim for the one in force.
-- ARGV[2..6]: origin, epoch ('' for lists, and for a query), digest of the list ('' for leaders), is the list new
--   (1, 0), take the store over from another origin (1, 0)
-- Replies: {claimed, now, epoch}   {fenced, now, epoch}   {foreign, now, origin}   {superseded, now}
operation('claim_pods', function(ARGV)
  local _, origin, epoch, digest, is_new, force = unpack(ARGV)
  local owner, current = ownership()
  local key = K.pod_list
  if not may_follow(origin, owner) then
    if force ~= '1' then return {'foreign', now, owner} end
    -- A higher epoch fences the previous origin off.
    adopt_writer(origin, current + 1)
    run('DEL', key)
    current = current + 1
  end
  if epoch ~= '' then
    local refused = fence(origin, epoch)
    if refused then return refused end
    return {'claimed', now, tonumber(epoch)}
  end
  if digest ~= '' then
    local list = try('HMGET', key, 'digest', 'followed_at')
    if list.err then run('DEL', key) end
    local current_digest, followed_at = unpack(list)
    if current_digest and current_digest ~= digest then
      followed_at = tonumber(followed_at) or 0
      if followed_at > now then
        -- The clock was set back.
        followed_at = now
        run('HSET', key, 'followed_at', text_of(now))
      end
      if is_new ~= '1' and now < followed_at + RULES.LIST_TTL then return {'superseded', now} end
      current = current + 1
    end
    adopt_writer(origin, current)
    run('HSET', key, 'digest', digest, 'followed_at', text_of(now))
  end
  return {'claimed', now, current}
end)
