-- Checks the permissions of the user and the state of the store, and marks an empty store as set up.
-- ARGV[2..4]: re-registration window (ms) of a store that begins empty, origin of the router's pods ('' for any),
--             1 to set an empty store up
-- Replies: {ready, now, schema}   {began, now}   {older, now}: written by the older router, to be adopted
--          {foreign, now, origin}: the store holds the pods of another origin; nothing has changed
--          {absent, now}: no router has set the store up; nothing has changed

-- All commands of the functions, except PUBLISH, which is optional.
local COMMANDS = 'DEL EXISTS GET HDEL HEXISTS HGET HGETALL HLEN HMGET HSCAN HSET HSETNX INCR LINDEX LPUSH LTRIM MGET '
  .. 'PEXPIRE PTTL SADD SCARD SET SISMEMBER SMEMBERS SRANDMEMBER SREM SSCAN TIME TYPE XADD ZADD ZCARD ZCOUNT ZPOPMIN '
  .. 'ZRANGE ZRANGEBYSCORE ZRANK ZREM ZREMRANGEBYRANK ZREMRANGEBYSCORE ZREVRANGE ZREVRANGEBYSCORE ZSCAN ZSCORE'

operation('open_store', function(ARGV)
  local _, window, origin, may_set_up = unpack(ARGV)
  -- A denied command would fail operations half done, and the next recovery would succeed again.
  for command in string.gmatch(COMMANDS, '%u+') do
    if not redis.acl_check_cmd(command, K.calls) then
      return redis.error_reply('NOPERM this user may not run ' .. command .. ', which the functions need')
    end
  end
  local owner = ownership()
  if origin ~= '' and not may_serve(origin, owner) then return {'foreign', now, owner} end
  local schema = read('GET', K.schema)
  if schema then return {'ready', now, schema} end
  if may_set_up ~= '1' then return {'absent', now} end
  if run('EXISTS', K.pod_metadata) > 0 then return {'older', now} end
  run('SET', K.schema, SCHEMA)
  run('HSET', K.tiers, ':trusting_until', now + tonumber(window))
  return {'began', now}
end)
