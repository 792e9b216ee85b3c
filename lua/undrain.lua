#!lua flags=allow-oom
-- Ends a drain before its time. A terminating pod stays out.
-- ARGV[3]: pod
-- Replies: {undrained, now, was draining (1, 0), is terminating (1, 0), tier}   {unknown, now}
-- include: base
-- include: pod
local f = facts_of(ARGV[3])
if not f then return {'unknown', now} end
local was = f.draining
if was then
  view('ZREM', P .. 'draining', f.pod)
  redis.call('DEL', P .. 'pod:draining:' .. f.pod)
  f.draining = false
  settle(f)
  place(f)
end
return {'undrained', now, was and 1 or 0, f.terminating and 1 or 0, f.tier or ''}
