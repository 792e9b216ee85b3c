-- Finds out whether its user may run the functions and what a store holds, and marks an empty one as ours.
-- ARGV[2..3]: for how long (ms) a store that begins empty believes pods about calls, origin of the router's pods (''
--   for any)
-- Replies: {ready, now, version}   {began, now}   {older, now}: filled by the older router, to be adopted
--          {foreign, now, origin}: it holds the pods of another origin; nothing has changed
-- All commands of the functions, but for PUBLISH, which may be denied.
local COMMANDS = 'DEL EXISTS GET HDEL HEXISTS HGET HGETALL HLEN HMGET HSCAN HSET HSETNX INCR LINDEX LPUSH LTRIM MGET '
  .. 'PEXPIRE PTTL SADD SCARD SET SISMEMBER SMEMBERS SRANDMEMBER SREM SSCAN TIME TYPE XADD ZADD ZCARD ZCOUNT ZPOPMIN '
  .. 'ZRANGE ZRANGEBYSCORE ZRANK ZREM ZREMRANGEBYRANK ZREMRANGEBYSCORE ZREVRANGE ZREVRANGEBYSCORE ZSCAN ZSCORE'

operation('begin', function(ARGV)
  local _, trusting, origin = unpack(ARGV)
  -- A command that is denied would fail operations half done, and the next recovery would succeed again.
  for command in string.gmatch(COMMANDS, '%u+') do
    if not redis.acl_check_cmd(command, K.calls) then
      return redis.error_reply('NOPERM this user may not run ' .. command .. ', which the functions need')
    end
  end
  local owner = ownership()
  if origin ~= '' and not may_serve(origin, owner) then return {'foreign', now, owner} end
  local version = read('GET', K.schema)
  if version then return {'ready', now, version} end
  if run('EXISTS', K.pod_metadata) > 0 then return {'older', now} end
  run('SET', K.schema, '1')
  run('HSET', K.tiers, ':trusting_until', now + tonumber(trusting))
  return {'began', now}
end)
