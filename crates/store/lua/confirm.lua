-- The stream of a call has started on its pod: the call keeps it for a whole lease.
-- One that came too late takes the pod again, if that is still free.
-- ARGV[2..6]: call, pod, lease (ms), life of the record (ms), number of the attempt ('' for any)
-- Replies: {confirmed, now}   {retaken, now, source pool}   {unknown, now}   {lost, now}: the store is empty
operation('confirm', function(ARGV)
  local _, call, pod, lease, life, number = unpack(ARGV)
  local deadline = now + tonumber(lease)
  -- Whether an ordinal is that of the attempt whose stream has started.
  local function is_that(attempts)
    return number == '' or tonumber(number) == attempts
  end
  local record = read_record(call)
  local on = record.pod_name
  if on and not (on == pod and is_that(tonumber(record.attempts) or 0)) then return {'unknown', now} end
  if on and record.stage ~= 'provisional' then return {'confirmed', now} end
  local f = facts_of(pod)
  if on then
    extend(f, call, deadline, life, record.merchant_id)
    run('HSET', K.call .. call, 'stage', '', 'attempt', '')
    if f then place_calls(f) end
    tell('confirmed', call, pod, '', record.merchant_id)
    return {'confirmed', now}
  end
  if not has_tiers() then return {'lost', now} end
  local missed = end_of(call)
  if not missed or missed.cause ~= 'unconfirmed' or missed.pod ~= pod or not is_that(missed.attempts)
    or not f or f.calls >= cap_of(f) then
    return {'unknown', now}
  end
  leave(call)
  run('DEL', K.call_end .. call)
  local attempts = missed.attempts > 0 and missed.attempts or ''
  local pool = give(f, call, {record = {}, merchant = missed.merchant, attempts = attempts}, deadline, life)
  return {'retaken', now, pool}
end)
