-- Ends a call at its own request and gives the pod back.
-- ARGV[2..8]: call, cause (agent, provider, operator, stream), and where given: pod it must be on, attempt it must stem
--   from, number of the attempt that is over, when (ms) it was asked for, if that was long ago, fingerprint of the
--   signed request that is taken back
-- Replies: {released, now, pod, source pool, lasted (ms), pool now, was draining (1, 0)}, without the last two if it is
--            the same pool and not draining   {not_found, now}
--          {waited, now, how long}: it had no pod yet, and has left
operation('release', function(ARGV)
  local _, call, cause, on, stems_from, number, asked_at, fingerprint = unpack(ARGV)
  on, stems_from, number = on or '', stems_from or '', number or ''
  local record = read_record(call)
  local pod = record.pod_name
  if not pod then
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
    -- The call is over once all requests that may have been answered with it are taken back.
    local rest = without_attempt(record.attempt, stems_from)
    if rest ~= '' then
      if rest then run('HSET', K.call .. call, 'attempt', rest) end
      return {'not_found', now}
    end
    if fingerprint and fingerprint ~= '' then run('DEL', K.seen .. fingerprint) end
  end
  if on ~= '' and on ~= pod
    or number ~= '' and tonumber(number) ~= (tonumber(record.attempts) or 0) then
    return {'not_found', now}
  end
  -- A call that began after the request for its release is another one of the same id.
  if asked_at and asked_at ~= '' and (tonumber(record.at or 0) or 0) > tonumber(asked_at) then
    return {'not_found', now}
  end
  local f = facts_of(pod, call)
  if record.stage == 'handed' then cause = 'abandoned' end
  end_call(f, call, record, cause)
  local source = pool_text(record.source_pool, f and f.tier)
  local pool, draining, time = source, 0, lasted(record.at)
  if f then
    f.released_at = seconds
    resettle(f, speaks_for(f, cause, time))
    if f.released_at then run('HSET', f.key, 'released_at', seconds) end
    pool = f.tier and names_of(f.tier).source or pool
    draining = leaving(f) and 1 or 0
  end
  if record.stage == 'handed' then return {'waited', now, time} end
  if pool == source and draining == 0 then return {'released', now, pod, source, time} end
  return {'released', now, pod, source, time, pool, draining}
end)
