-- choose_pod: selection of a pod of a pool for the next call.

-- Returns the facts of a pod that can take a call; nil if it cannot.
local function usable(pod_name, tier, cap)
  local pod = readable_facts_of(pod_name)
  return pod and pod.calls < cap and pod.tier == tier and is_serving(pod) and pod or nil
end

-- Returns the first usable pod, other than `avoid`; a pod at risk only if there is no other.
local function first_usable(pod_names, tier, cap, avoid)
  if type(pod_names) ~= 'table' or pod_names.err then return nil end
  local last_choice
  for _, pod_name in ipairs(pod_names) do
    local pod = pod_name ~= avoid and usable(pod_name, tier, cap)
    if pod and not pod.at_risk then return pod end
    last_choice = last_choice or pod or nil
  end
  return last_choice
end

-- Returns the ordinal of a pod of a StatefulSet, which its name ends with; a pod without one ranks last.
local ordinal_in = memoized(function(pod_name)
  local digits = string.match(pod_name, '-(%d+)$')
  return digits and #digits <= 9 and tonumber(digits) or math.huge
end)

-- Draws the pod with the lowest ordinal of a sample: a StatefulSet removes the highest ordinals first, so that they
-- have to become idle.
local function draw_low_ordinal(key, tier, avoid)
  local sample = run_index('SRANDMEMBER', key, text_of(RULES.ORDINAL_SAMPLE))
  table.sort(sample, function(a, b) return ordinal_in(a) < ordinal_in(b) end)
  return first_usable(sample, tier, 1, avoid)
end

-- Draws from all pods of a pool, while its index of available pods was replaced and is not filled yet.
local function draw_assigned(tier, kind, avoid)
  local cap = kind.kind == 'shared' and kind.cap or 1
  return first_usable(try('SRANDMEMBER', pool_keys_of(tier).assigned, '64'), tier, cap, avoid)
end

-- Returns a usable pod that the cluster is about to disrupt, other than `avoid`. Such pods are the last choice.
local function draw_at_risk(tier, kind, avoid)
  local key, cap = pool_keys_of(tier).at_risk, kind.kind == 'shared' and kind.cap or 1
  local command, from, to = 'ZRANGEBYSCORE', '-inf', '(' .. cap
  if kind.strategy == 'pack' then command, from, to = 'ZREVRANGEBYSCORE', to, from end
  local first = run_index(command, key, from, to, 'LIMIT', '0', '1')
  -- Usually the pool has none.
  if type(first) ~= 'table' or #first == 0 then return nil end
  return first_usable(first, tier, cap, avoid)
    or first_usable(try(command, key, from, to, 'LIMIT', '1', '16'), tier, cap, avoid)
end

-- Returns the reason why a pool has no usable pod.
local function reason_of(keys)
  if count('SCARD', keys.assigned) > count('ZCARD', keys.out) then return 'at_capacity' end
  if count('ZCOUNT', keys.out, 1, 1) > 0 then return 'all_draining' end
  return 'empty'
end

-- Returns a usable pod of a pool, other than `avoid`; nil and the reason if there is none.
local function draw(tier, kind, avoid)
  local key = pool_keys_of(tier).available
  local pod
  if kind.strategy == 'ordinal' then
    pod = draw_low_ordinal(key, tier, avoid)
  elseif kind.kind ~= 'shared' then
    local any = run_index('SRANDMEMBER', key)
    if type(any) == 'string' then
      pod = any ~= avoid and usable(any, tier, 1) or first_usable(try('SRANDMEMBER', key, '16'), tier, 1, avoid)
    end
  else
    local cap, below = kind.cap, '(' .. kind.cap
    if kind.strategy == 'pack' then
      pod = first_usable(run_index('ZREVRANGEBYSCORE', key, below, '-inf', 'LIMIT', '0', '1'), tier, cap, avoid)
        or first_usable(try('ZREVRANGEBYSCORE', key, below, '-inf', 'LIMIT', '1', '16'), tier, cap, avoid)
    else
      pod = first_usable(run_index('ZRANGEBYSCORE', key, '-inf', below, 'LIMIT', '0', '1'), tier, cap, avoid)
        or first_usable(try('ZRANGEBYSCORE', key, '-inf', below, 'LIMIT', '1', '16'), tier, cap, avoid)
    end
  end
  pod = pod or draw_at_risk(tier, kind, avoid)
  if pod then return pod end
  return nil, reason_of(pool_keys_of(tier))
end

-- Walks the chain. Returns the pod, and the steps skipped before it. With `respects_held`, a pool needs more free slots
-- than it holds for dials, except the pool `reserved_in`.
local function choose_pod(steps, avoid, respects_held, reserved_in)
  local tried = ''
  for _, step in ipairs(steps) do
    local pod, reason
    if step.kind then pod, reason = draw(step.tier, step.kind, avoid) else reason = 'unknown' end
    if pod and respects_held and step.tier ~= reserved_in and not outbound.is_open(step.tier) then
      pod, reason = nil, 'held'
    end
    if pod then return pod, tried end
    tried = (tried == '' and '' or tried .. ' ') .. step.step .. '=' .. reason
  end
  if run('EXISTS', K.audit_due) == 1 then
    for _, step in ipairs(steps) do
      local pod = step.kind and draw_assigned(step.tier, step.kind, avoid)
      if pod then return pod, '' end
    end
  end
  return nil, tried
end

-- Hands free pods off to requeued calls, which have lost the pod of their first hand-off.
local function hand_off_requeued(calls)
  if #calls > 0 then
    local chain = try('HGET', K.tiers, ':chain')
    if type(chain) == 'string' then ordered_merchants = parse_ordered(chain) end
  end
  table.sort(calls, function(a, b) return a.score < b.score or a.score == b.score and a.call < b.call end)
  for _, requeued in ipairs(calls) do
    local call = requeued.call
    local entry = queue_entry_of(call)
    for tier in string.gmatch(entry and entry.is_waiting and entry.pools or '', '%S+') do
      local kind = kind_of(tier)
      local may_use = kind and (outbound.is_dialed(entry.score) or outbound.is_open(tier))
      local pod = may_use and draw(tier, kind)
      if pod then
        hand_off(pod, call)
        break
      end
    end
  end
end
