#!lua flags=allow-oom
-- Takes calls without a record out of the index of all calls.
-- ARGV[3..4]: cursor, about how many calls
-- Replies: {audited, now, next cursor, calls seen, {calls repaired}}
-- include: base
local scanned = read('ZSCAN', P .. 'calls', ARGV[3], 'COUNT', ARGV[4])
local repaired, seen = {}, 0
for i = 1, #scanned[2], 2 do
  seen = seen + 1
  if redis.call('EXISTS', P .. 'call:' .. scanned[2][i]) == 0 then
    redis.call('ZREM', P .. 'calls', scanned[2][i])
    repaired[#repaired + 1] = scanned[2][i]
  end
end
return {'audited', now, scanned[1], seen, repaired}
