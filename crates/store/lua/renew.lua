-- Extends the leases of calls. For a while after the store began, a pod's word
-- is enough to register a call that nobody knows.
-- ARGV[2..4]: lease (ms), life of the record (ms), pod that speaks ('' for none); then the calls
-- Replies: {renewed, now, deadline, {unknown calls}, {registered calls}, {calls to be told again later}}
--          {lost, now}: the store is empty
local FIRST_CALL = 5

operation('renew', function(ARGV)
  local _, lease, life, speaker = unpack(ARGV, 1, 4)
  local deadline = now + tonumber(lease)
  local unknown, registered, later, touched = {}, {}, {}, {}

  -- Where a call that nobody knows belongs: registered on the pod that has it, to
  -- be told again when that pod is known, too, or unknown.
  local function adopt(call)
    if speaker == '' then return unknown end
    local f = touched[speaker] or readable_facts_of(speaker)
    read_table(f and f.tier)
    if now >= trusting_until or run('ZSCORE', K.ended, call) then return unknown end
    if not f then return later end
    if not f.tier then
      local tier = home()
      if not tier then return unknown end
      set_home(f, tier)
      place_service(f)
    end
    local kind = kind_of(f.tier)
    if f.calls >= (kind and kind.kind == 'shared' and kind.cap or 1) then return unknown end
    leave(call)
    give(f, call, {record = {}}, deadline, life)
    touched[speaker] = f
    return registered
  end

  for i = FIRST_CALL, #ARGV do
    local call = ARGV[i]
    local record = try('HMGET', K.call .. call, 'pod_name', 'merchant_id', 'stage', 'attempt')
    local pod, merchant, stage, attempt = unpack(record)
    -- One call or pod that can't be read must not keep the others from being renewed.
    local readable = not record.err
    if readable and pod and not touched[pod] then
      local f, wrong = readable_facts_of(pod)
      touched[pod], readable = f, not wrong
    end
    if not readable then
      unknown[#unknown + 1] = call
    elseif pod and (speaker == '' or speaker == pod) then
      extend({calls_key = K.pod_calls .. pod}, call, deadline, life, merchant)
      if stage and stage ~= '' or attempt and attempt ~= '' then
        -- A renewal proves that the stream has started: no request may take the call back any more.
        run('HSET', K.call .. call, 'stage', '', 'attempt', '')
        if stage == 'provisional' then tell('confirmed', call, pod, '', merchant) end
      end
    elseif not pod and not has_tiers() then
      return {'lost', now}
    else
      local kept = pod and unknown or adopt(call)
      kept[#kept + 1] = call
    end
  end
  for _, f in pairs(touched) do
    f.calls = run('ZCARD', f.calls_key)
    place_calls(f)
  end
  return {'renewed', now, deadline, unknown, registered, later}
end)
