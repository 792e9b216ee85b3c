-- Moves an idle pod to another pool of the table.
-- ARGV[2..6]: origin, epoch, pod, uid, tier
-- Replies: {moved, now}   {unknown_pool, now}   {not_there, now}   {not_idle, now}
--          {fenced, now, epoch}   {foreign, now, origin}
operation('move_pod', function(ARGV)
  local _, origin, epoch, pod, uid, tier = unpack(ARGV)
  local refused = fence(origin, epoch)
  if refused then return refused end
  if not wanted(tier) then return {'unknown_pool', now} end
  local f = facts_of(pod)
  if not f or uid_of(f) ~= uid then return {'not_there', now} end
  if f.calls > 0 or not serving(f) or pinned(f) then return {'not_idle', now} end
  if f.tier ~= tier then
    set_home(f, tier)
    place(f)
    serve(f)
  end
  return {'moved', now}
end)
