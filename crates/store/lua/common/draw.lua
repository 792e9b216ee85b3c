-- draw: which pod of a pool takes the next call.

-- The facts of a pod, if it is one that takes a call; nil if not.
local function usable(pod, tier, cap)
  local f = readable_facts_of(pod)
  return f and f.calls < cap and f.tier == tier and serving(f) and f or nil
end

-- The first of some pods that takes a call.
local function first_usable(pods, tier, cap, avoid)
  if type(pods) ~= 'table' or pods.err then return nil end
  for _, pod in ipairs(pods) do
    local f = pod ~= avoid and usable(pod, tier, cap)
    if f then return f end
  end
end

-- A pod from all those of a pool, for a view of available pods that was replaced and is not filled yet.
local function draw_assigned(tier, kind, avoid)
  local cap = kind.kind == 'shared' and kind.cap or 1
  return first_usable(try('SRANDMEMBER', names_of(tier).assigned, '64'), tier, cap, avoid)
end

-- A pod of a pool that takes a call, and not `avoid`; nil and why there is none.
local function draw(tier, kind, avoid)
  local key = names_of(tier).available
  local found
  if kind.kind ~= 'shared' then
    local any = view('SRANDMEMBER', key)
    if type(any) == 'string' then
      found = any ~= avoid and usable(any, tier, 1) or first_usable(try('SRANDMEMBER', key, '16'), tier, 1, avoid)
    end
  else
    local cap, below = kind.cap, '(' .. kind.cap
    if kind.strategy == 'pack' then
      found = first_usable(view('ZREVRANGEBYSCORE', key, below, '-inf', 'LIMIT', '0', '1'), tier, cap, avoid)
        or first_usable(try('ZREVRANGEBYSCORE', key, below, '-inf', 'LIMIT', '1', '16'), tier, cap, avoid)
    else
      found = first_usable(view('ZRANGEBYSCORE', key, '-inf', below, 'LIMIT', '0', '1'), tier, cap, avoid)
        or first_usable(try('ZRANGEBYSCORE', key, '-inf', below, 'LIMIT', '1', '16'), tier, cap, avoid)
    end
  end
  if found then return found end
  local out = names_of(tier).out
  if count('SCARD', names_of(tier).assigned) > count('ZCARD', out) then return nil, 'at_capacity' end
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
