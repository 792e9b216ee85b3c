-- Finds out what a store holds, and marks an empty one as ours.
-- ARGV[2..3]: for how long (ms) a store that begins empty believes pods about calls, origin of the router's pods ('' for
--   any)
-- Replies: {ready, now, version}   {began, now}   {older, now}: filled by the older router, to be adopted
--          {foreign, now, origin}: it holds the pods of another origin; nothing has changed
operation('begin', {'allow-oom'}, function(ARGV)
  local owner = ownership()
  if ARGV[3] ~= '' and not may_serve(ARGV[3], owner) then return {'foreign', now, owner} end
  local version = read('GET', P .. 'schema')
  if version then return {'ready', now, version} end
  if run('EXISTS', P .. 'pod:metadata') > 0 then return {'older', now} end
  run('SET', P .. 'schema', '1')
  run('HSET', P .. 'tiers', ':trusting_until', now + tonumber(ARGV[2]))
  return {'began', now}
end)
