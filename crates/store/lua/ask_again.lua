-- What a call is told that has a pod, was handed one, waits, or lost its stream, while Redis is full
-- and takes no new ones. A call that lost its stream leaves its pod.
-- ARGV: as in allocate.lua
-- Replies: as in allocate.lua   {unknown, now}: it needs a pod
operation('ask_again', function(ARGV)
  local q = asked(ARGV)
  local told = q.after and leave_pod(q) or told_again(q)
  hand_on(q)
  return told or {'unknown', now}
end)
