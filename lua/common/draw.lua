-- draw: which pod of a pool takes the next call.

-- A pod of a pool that takes a call, and not `avoid`; nil and why there is none.
local function draw(tier, kind, avoid)
  local key = available_key(tier)
  local function try(pods)
    if type(pods) ~= 'table' or pods.err then return nil end
    for _, pod in ipairs(pods) do
      local f = readable_facts_of(pod)
      local room = f and f.calls < (kind.kind == 'shared' and kind.cap or 1)
      if room and f.tier == tier and serving(f) and pod ~= avoid then return f end
    end
  end
  local found
  if kind.kind ~= 'shared' then
    found = try(redis.pcall('SRANDMEMBER', key, 1)) or try(redis.pcall('SRANDMEMBER', key, 16))
  elseif kind.strategy == 'pack' then
    found = try(redis.pcall('ZREVRANGEBYSCORE', key, '(' .. kind.cap, '-inf', 'LIMIT', 0, 1))
      or try(redis.pcall('ZREVRANGEBYSCORE', key, '(' .. kind.cap, '-inf', 'LIMIT', 1, 16))
  else
    found = try(redis.pcall('ZRANGEBYSCORE', key, '-inf', '(' .. kind.cap, 'LIMIT', 0, 1))
      or try(redis.pcall('ZRANGEBYSCORE', key, '-inf', '(' .. kind.cap, 'LIMIT', 1, 16))
  end
  if found then return found end
  local out = out_key(tier)
  if count('SCARD', assigned_key(tier)) > count('ZCARD', out) then return nil, 'at_capacity' end
  if count('ZCOUNT', out, 1, 1) > 0 then return nil, 'all_draining' end
  return nil, 'empty'
end

-- Gives calls that wait again, because the pod they were handed has gone, any other
-- that is free.
local function reseat(calls)
  table.sort(calls, function(a, b) return a.score < b.score or a.score == b.score and a.call < b.call end)
  for _, waiter in ipairs(calls) do
    local call = waiter.call
    local place = place_of(call)
    for tier in string.gmatch(place and place.waits and place.pools or '', '%S+') do
      local kind = kind_of(tier)
      local f = kind and draw(tier, kind)
      if f then
        hand(f, call)
        break
      end
    end
  end
end
