-- Extends the leases of calls. Within the re-registration window after a store began empty, a pod's renewal registers
-- unknown calls on it.
-- ARGV[2..4]: lease (ms), life of the record (ms), pod that renews ('' for none); then the calls
-- Replies: {renewed, now, deadline, {unknown calls}, {registered calls}, {calls to renew again later}}
--          {lost, now}: the store is empty
local FIRST_CALL = 5

operation('renew', function(ARGV)
  local _, lease, life, renewing_pod = unpack(ARGV, 1, 4)
  local deadline = now + tonumber(lease)
  local unknown, registered, later, pods = {}, {}, {}, {}

  -- Registers an unknown call on the renewing pod. Returns the list that the call belongs in: registered, later if the
  -- pod itself is not known yet, or unknown.
  local function reregister(call)
    read_table()
    if renewing_pod == '' or now >= trusting_until then return unknown end
    local pod = pods[renewing_pod] or readable_facts_of(renewing_pod)
    local obstacle = reregistration_obstacle(pod, call)
    if obstacle then return obstacle == 'unknown_pod' and later or unknown end
    leave_queue(call)
    allocate_pod(pod, call, {record = {}}, deadline, life)
    pods[renewing_pod] = pod
    return registered
  end

  for i = FIRST_CALL, #ARGV do
    local call = ARGV[i]
    local reply = try('HMGET', K.call .. call, 'pod_name', 'merchant_id', 'stage', REQUEST_IDS)
    local pod_name, merchant, stage, request_ids = unpack(reply)
    if pod_name and not request_ids then request_ids = record_of(call).request_ids end
    -- One call or pod that cannot be read must not prevent the renewal of the others.
    local is_readable = not reply.err
    if is_readable and pod_name and not pods[pod_name] then
      local pod, err = readable_facts_of(pod_name)
      pods[pod_name], is_readable = pod, not err
    end
    if not is_readable then
      unknown[#unknown + 1] = call
    elseif pod_name and (renewing_pod == '' or renewing_pod == pod_name) then
      set_deadline({calls_key = K.pod_calls .. pod_name}, call, deadline, life, merchant)
      if stage and stage ~= '' or request_ids and request_ids ~= '' then
        -- A renewal proves that the stream has started: no compensating release may end the call any more.
        run('HSET', K.call .. call, 'stage', '', REQUEST_IDS, '')
        if PROVISIONAL[stage] then record_event('confirmed', call, pod_name, '', merchant) end
      end
    elseif not pod_name and not has_tiers() then
      return {'lost', now}
    else
      local list = pod_name and unknown or reregister(call)
      list[#list + 1] = call
    end
  end
  for _, pod in pairs(pods) do
    pod.calls = run('ZCARD', pod.calls_key)
    place_calls(pod)
  end
  return {'renewed', now, deadline, unknown, registered, later}
end)
