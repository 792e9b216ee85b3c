-- Ends the call of a stream that has ended, and frees its pod. A call that was released before ends with that cause.
-- ARGV[2..5]: call, stream id, cause (agent, provider, gateway, unreachable, pod_lost, …), reason of the pod's failure
--   or ''
-- Replies: {released, …}: as in release.lua   {not_found, now}: this stream is not attached
operation('detach', function(ARGV)
  local _, call, stream, cause, reason = unpack(ARGV)
  local record = read_record(call)
  local attached = stream_of(record)
  if not attached or attached.id ~= stream then return {'not_found', now} end
  record_pod_failure(call, record, reason)
  return end_released(call, record, end_cause_of(attached, cause))
end)
