#!lua flags=allow-oom
-- Puts another tier table in force. The views of pools whose kind has changed, or
-- that are no more, go at once; the pods are placed again by the audit.
-- ARGV[3..5]: epoch, tier document ('' to leave the one there is), chain; then a tier and its entry, again and again
-- Replies: {applied, now}   {unchanged, now}   {fenced, now, epoch}
-- include: base
-- include: fence
local fresh = {}
for i = 6, #ARGV, 2 do fresh[ARGV[i]] = ARGV[i + 1] end
local fields = read('HGETALL', P .. 'tiers')
local same, trusting = true, nil
local before = {}
for i = 1, #fields, 2 do
  if fields[i] == ':trusting_until' then
    trusting = fields[i + 1]
  elseif fields[i] == ':chain' then
    same = same and fields[i + 1] == ARGV[5]
    before[fields[i]] = true
  else
    before[fields[i]] = fields[i + 1]
    same = same and fresh[fields[i]] == fields[i + 1]
  end
end
for name in pairs(fresh) do same = same and before[name] ~= nil end
if ARGV[4] ~= '' then redis.call('SET', P .. 'tier:config', ARGV[4]) end
if same and before[':chain'] then return {'unchanged', now} end
for name, text in pairs(before) do
  if name ~= ':chain' then
    local was = (parse_entry(text) or {}).kind
    local is = fresh[name] and parse_entry(fresh[name]).kind
    if was ~= is then
      redis.call('DEL', P .. 'pool:' .. name .. ':available')
    end
  end
end
redis.call('DEL', P .. 'tiers')
redis.call('HSET', P .. 'tiers', ':chain', ARGV[5])
if trusting then redis.call('HSET', P .. 'tiers', ':trusting_until', trusting) end
for name, text in pairs(fresh) do redis.call('HSET', P .. 'tiers', name, text) end
return {'applied', now}
