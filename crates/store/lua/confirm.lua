-- The stream of a call has started on its pod: the call keeps it for a whole lease.
-- One that came too late takes the pod again, if that is still free.
-- ARGV[2..6]: call, pod, lease (ms), life of the record (ms), number of the attempt ('' for any)
-- Replies: {confirmed, now}   {retaken, now, source pool}   {unknown, now}   {lost, now}: the store is empty
operation('confirm', function(ARGV)
  local call, pod, lease, life = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
  local deadline = now + lease
  local record = read('HMGET', K.call .. call, 'pod_name', 'stage', 'merchant_id', 'attempts')
  if record[1] and (record[1] ~= pod or ARGV[6] ~= '' and tonumber(ARGV[6]) ~= (tonumber(record[4] or 0) or 0)) then return {'unknown', now} end
  if record[1] and record[2] ~= 'provisional' then return {'confirmed', now} end
  local f = facts_of(pod)
  if record[1] then
    extend(f, call, deadline, life, record[3])
    run('HSET', K.call .. call, 'stage', '', 'attempt', '')
    if f then place_calls(f) end
    tell('confirmed', call, pod, '', record[3])
    return {'confirmed', now}
  end
  if not has_tiers() then return {'lost', now} end
  local missed = end_of(call)
  if not missed or missed.cause ~= 'unconfirmed' or missed.pod ~= pod or ARGV[6] ~= '' and tonumber(ARGV[6]) ~= missed.attempts or not f or f.calls >= cap_of(f) then
    return {'unknown', now}
  end
  leave(call)
  run('DEL', K.call_end .. call)
  local pool = give(f, call, {record = {}, merchant = missed.merchant, attempts = missed.attempts > 0 and missed.attempts or ''}, deadline, life)
  return {'retaken', now, pool}
end)
