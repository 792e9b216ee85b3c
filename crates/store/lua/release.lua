-- Ends a call at its own request and gives the pod back.
-- ARGV[2..8]: call, cause (agent, provider, operator, stream), and where given: pod it must be on, attempt it must stem from,
--   number of the attempt that is over, when (ms) it was asked for, if that was long ago,
--   fingerprint of the signed request that is taken back
-- Replies: {released, now, pod, source pool, lasted (ms), pool now, was draining (1, 0)}, without the last two if it is
--            the same pool and not draining   {not_found, now}
--          {waited, now, how long}: it had no pod yet, and has left
operation('release', function(ARGV)
  local call, cause, on, stems_from, number = ARGV[2], ARGV[3], ARGV[4] or '', ARGV[5] or '', ARGV[6] or ''
  local key = K.call .. call
  local record = checked(key, try('HMGET', key, 'pod_name', 'source_pool', 'at', 'attempt', 'merchant_id', 'stage', 'attempts'))
  if not record[1] then
    -- It was waiting, or explains why its stream is gone.
    if stems_from ~= '' then return {'not_found', now} end
    local since = on == '' and leave(call)
    if since then return {'waited', now, max(0, now - since)} end
    local ended = end_of(call)
    local is_that = ended and (on == '' or on == ended.pod) and (number == '' or tonumber(number) == ended.attempts)
    if is_that and not is_final[ended.cause] then
      if is_final[cause] then
        explain(call, ended, cause)
      elseif ended.cause == 'unconfirmed' then
        -- A stream that is over does not start any more; its pod was blamed before.
        explain(call, ended, 'broken')
      end
    end
    return {'not_found', now}
  end
  if stems_from ~= '' then
    -- It is over when nobody is left who may have heard of it.
    local rest = without_attempt(record[4] or '', stems_from)
    if rest ~= '' then
      if rest then run('HSET', key, 'attempt', rest) end
      return {'not_found', now}
    end
    if (ARGV[8] or '') ~= '' then run('DEL', K.seen .. ARGV[8]) end
  end
  if on ~= '' and on ~= record[1]
    or number ~= '' and tonumber(number) ~= (tonumber(record[7] or 0) or 0) then
    return {'not_found', now}
  end
  -- A call that began after that is another of the same id.
  if (ARGV[7] or '') ~= '' and (tonumber(record[3] or 0) or 0) > tonumber(ARGV[7]) then return {'not_found', now} end
  local f = facts_of(record[1], call)
  if record[6] == 'handed' then cause = 'abandoned' end
  end_call(f, call, {pod = record[1], at = record[3], merchant = record[5] or '', stage = record[6] or '', attempts = record[7] or ''}, cause)
  local source = pool_text(record[2], f and f.tier)
  local pool, draining, time = source, 0, lasted(record[3])
  if f then
    f.released_at = seconds
    resettle(f, speaks_for(f, cause, time))
    if f.released_at then run('HSET', f.key, 'released_at', seconds) end
    pool = f.tier and names_of(f.tier).source or pool
    draining = leaving(f) and 1 or 0
  end
  if record[6] == 'handed' then return {'waited', now, time} end
  if pool == source and draining == 0 then return {'released', now, record[1], source, time} end
  return {'released', now, record[1], source, time, pool, draining}
end)
