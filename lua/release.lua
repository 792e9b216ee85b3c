-- Ends a call at its own request and gives the pod back.
-- ARGV[3..7]: call, pod it must be on ('' for any), attempt it must stem from ('' for any),
--   number of the attempt that is over ('' for any), cause (agent, provider, stream)
-- Replies: {released, now, pod, source pool, pool now, was draining (1, 0), lasted (ms)}   {not_found, now}
--          {waited, now, how long}: it had no pod yet, and has left
operation('release', {'allow-oom'}, function(ARGV)
  local call, cause = ARGV[3], ARGV[7]
  local record = read('HMGET', P .. 'call:' .. call, 'pod_name', 'source_pool', 'at', 'attempt', 'merchant_id', 'stage', 'attempts')
  if not record[1] then
    -- It was waiting, or explains why its stream is gone.
    if ARGV[5] ~= '' then return {'not_found', now} end
    local since = ARGV[4] == '' and leave(call)
    if since then return {'waited', now, math.max(0, now - since)} end
    local ended = end_of(call)
    local is_that = ended and (ARGV[4] == '' or ARGV[4] == ended.pod) and (ARGV[6] == '' or tonumber(ARGV[6]) == ended.attempts)
    if is_that and ended.cause ~= 'agent' and ended.cause ~= 'provider' then
      if cause == 'agent' or cause == 'provider' then
        explain(call, ended, cause)
      elseif ended.cause == 'unconfirmed' then
        -- A stream that is over does not start any more; its pod was blamed before.
        explain(call, ended, 'broken')
      end
    end
    return {'not_found', now}
  end
  if ARGV[4] ~= '' and ARGV[4] ~= record[1] or ARGV[5] ~= '' and ARGV[5] ~= record[4]
    or ARGV[6] ~= '' and tonumber(ARGV[6]) ~= (tonumber(record[7] or 0) or 0) then
    return {'not_found', now}
  end
  local f = facts_of(record[1])
  if f then read_table(f) end
  if record[6] == 'handed' then cause = 'abandoned' end
  end_call(f, call, {pod = record[1], at = record[3], merchant = record[5] or '', stage = record[6] or '', attempts = record[7] or ''}, cause)
  local source = pool_text(record[2], f and f.tier)
  local pool, draining = source, 0
  if f then
    resettle(f, speaks_for(f, cause, lasted(record[3])))
    redis.call('HSET', P .. 'pod:' .. f.pod, 'released_at', math.floor(now / 1000))
    pool = f.tier and source_pool(f.tier) or pool
    draining = leaving(f) and 1 or 0
  end
  if record[6] == 'handed' then return {'waited', now, lasted(record[3])} end
  return {'released', now, record[1], source, pool, draining, lasted(record[3])}
end)
