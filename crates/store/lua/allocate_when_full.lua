-- Answers an allocate request while Redis is full and accepts no new calls: repeats the reply for a pod, a hand-off or
-- a queue entry, and ends the previous pod attempt of a reconnecting call.
-- ARGV: as in allocate.lua
-- Replies: as in allocate.lua   {unknown, now}: the call needs a pod
operation('allocate_when_full', function(ARGV)
  local request = parse_request(ARGV)
  local reply = request.previous and settle_previous(request) or answer_repeat(request)
  hand_off_released_pod(request)
  return reply or {'unknown', now}
end)
