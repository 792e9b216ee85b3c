-- Finds out what a store holds, and marks an empty one as ours.
-- ARGV[3]: for how long (ms) a store that begins empty believes pods about calls
-- Replies: {ready, now, version}   {began, now}   {older, now}: filled by the older router, to be adopted
operation('begin', {'allow-oom'}, function(ARGV)
  local version = read('GET', P .. 'schema')
  if version then return {'ready', now, version} end
  if redis.call('EXISTS', P .. 'pod:metadata') > 0 then return {'older', now} end
  redis.call('SET', P .. 'schema', '1')
  redis.call('HSET', P .. 'tiers', ':trusting_until', now + tonumber(ARGV[3]))
  return {'began', now}
end)
