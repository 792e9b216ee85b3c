-- reregister: calls that the store has lost, and that their pod or their gateway reports again.

-- Checks whether a call that the store does not know may be registered on a pod: if it has not ended within the
-- re-registration window. The pod need not be in service, because it serves the call already. Returns nil, or the
-- reason against it.
local function reregistration_obstacle(pod, call)
  read_table(pod and pod.tier)
  if now < trusting_until and run_index('ZSCORE', K.ended, call) then return 'ended' end
  if not pod then return 'unknown_pod' end
  if not pod.tier then
    local tier = default_pool()
    if not tier then return 'no_slot' end
    set_pool(pod, tier)
    place_service(pod)
  end
  if pod.calls >= slots_of(pod) then return 'no_slot' end
end
