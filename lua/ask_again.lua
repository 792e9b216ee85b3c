#!lua flags=allow-oom
-- What a call is told that has a pod, was handed one, or waits, while Redis is full
-- and takes no new ones.
-- ARGV: as in allocate.lua
-- Replies: as in allocate.lua   {unknown, now}: it would be a new one
-- include: base
-- include: pod
-- include: queue
-- include: draw
-- include: again
return not after and told_again() or {'unknown', now}
