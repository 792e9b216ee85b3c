-- What a call is told that has a pod, was handed one, or waits, while Redis is full
-- and takes no new ones.
-- ARGV: as in allocate.lua
-- Replies: as in allocate.lua   {unknown, now}: it would be a new one
operation('ask_again', {'allow-oom'}, function(ARGV)
  local q = asked(ARGV)
  local after, record = q.after, q.record or {}
  -- One whose stream is gone needs another pod, unless it has that already.
  local is_that = after and record[1] == after.pod and (tonumber(record[6] or 0) or 0) == after.attempt
  return not is_that and told_again(q) or {'unknown', now}
end)
