-- Moves an idle pod to another pool of the tier table.
-- ARGV[2..6]: origin, epoch, pod, uid, tier
-- Replies: {moved, now}   {unknown_pool, now}   {not_there, now}: no such pod   {not_idle, now}
--          {fenced, now, epoch}   {foreign, now, origin}
operation('move_pod', function(ARGV)
  local _, origin, epoch, pod_name, uid, tier = unpack(ARGV)
  local refused = fence(origin, epoch)
  if refused then return refused end
  if not is_defined(tier) then return {'unknown_pool', now} end
  local pod = facts_of(pod_name)
  if not pod or uid_of(pod) ~= uid then return {'not_there', now} end
  if pod.calls > 0 or not is_serving(pod) or pinned(pod) then return {'not_idle', now} end
  if pod.tier ~= tier then
    set_pool(pod, tier)
    place(pod)
    hand_off_free_slots(pod)
  end
  return {'moved', now}
end)
