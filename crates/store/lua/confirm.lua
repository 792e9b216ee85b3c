-- Confirms a provisional call: its stream has started on its pod, and its lease begins. A confirmation after the
-- provisional lease has expired takes the pod again if it is still free.
-- ARGV[2..6]: call, pod, lease (ms), life of the record (ms), pod attempt ('' for any)
-- Replies: {confirmed, now}   {retaken, now, source pool}   {unknown, now}   {lost, now}: the store is empty
operation('confirm', function(ARGV)
  local _, call, pod_name, lease, life, pod_attempt = unpack(ARGV)
  local deadline = now + tonumber(lease)
  -- Returns whether a pod attempt is the one whose stream has started.
  local function is_that(attempt)
    return pod_attempt == '' or tonumber(pod_attempt) == attempt
  end
  local record = read_record(call)
  local current_pod = record.pod_name
  if current_pod and not (current_pod == pod_name and is_that(tonumber(record.pod_attempt) or 0)) then
    return {'unknown', now}
  end
  if current_pod and not PROVISIONAL[record.stage] then return {'confirmed', now} end
  local pod = facts_of(pod_name)
  if current_pod then
    set_deadline(pod, call, deadline, life, record.merchant_id)
    run('HSET', K.call .. call, 'stage', '', REQUEST_IDS, '')
    if pod then place_calls(pod) end
    record_event('confirmed', call, pod_name, '', record.merchant_id)
    return {'confirmed', now}
  end
  if not has_tiers() then return {'lost', now} end
  local call_end = call_end_of(call)
  if not call_end or call_end.cause ~= 'unconfirmed' or call_end.pod_name ~= pod_name
    or not is_that(call_end.pod_attempt) or not pod or pod.calls >= cap_of(pod) then
    return {'unknown', now}
  end
  leave_queue(call)
  run('DEL', K.call_end .. call)
  local attempt = call_end.pod_attempt > 0 and call_end.pod_attempt or ''
  local fields = {record = {}, merchant = call_end.merchant, pod_attempt = attempt, number = call_end.number}
  local pool = allocate_pod(pod, call, fields, deadline, life)
  return {'retaken', now, pool}
end)
