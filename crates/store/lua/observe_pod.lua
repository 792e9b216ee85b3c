-- Takes note of a pod as it is now. Another UID, or a restarted agent, means that
-- the calls on it are over.
-- ARGV[2..10]: origin, epoch, pod, uid, address, ready (1, 0), terminating (1, 0), restarts, pin
-- Replies: {observed, now, joined (1, 0), tier, {call, source pool, lasted, ...}}   {lost, now}: the store is empty
--          {fenced, now, epoch}   {foreign, now, origin}
operation('observe_pod', function(ARGV)
  local _, origin, epoch, pod, uid, address, ready, terminating, restarts, pin = unpack(ARGV)
  local refused = fence(origin, epoch)
  if refused then return refused end
  if not is_set_up() or not has_tiers() then return {'lost', now} end
  local f = facts_of(pod)
  local joined, ended, seatless = f == nil, {}, {}
  if f then
    read_table(f.tier)
    -- A pod adopted from the older router has no UID yet.
    local known = uid_of(f)
    local replaced = known ~= '' and known ~= uid
    local before = tonumber(run('HGET', K.pod .. pod, 'restarts') or 0) or 0
    if replaced or known ~= '' and before < tonumber(restarts) then
      ended, seatless = end_calls(f)
      fared_well(f)
    end
    -- A status may come without a count; that is no news.
    if not replaced and before > tonumber(restarts) then restarts = before end
    if replaced and f.draining then
      view('ZREM', K.draining, pod)
      run('DEL', K.pod_draining .. pod)
      tell('undrained', '', pod, '')
      announce_drain(pod)
      f.draining = false
    end
    joined = replaced
  end
  if joined then
    tell('joined', '', pod, '', '', address)
  elseif terminating == '1' and not f.terminating then
    tell('terminating', '', pod, '')
  elseif (ready == '1') == (f.unready or false) then
    tell(ready == '1' and 'ready' or 'not_ready', '', pod, '')
  end
  run('HSET', K.pod .. pod, 'uid', uid, 'address', address, 'ready', ready,
    'terminating', terminating, 'restarts', restarts, 'pin', pin, 'plain', '')
  f = facts_of(pod)
  view('HSET', K.pod_metadata, pod, cjson.encode({tier = f.tier or '', name = pod}))
  resettle(f, true)
  reseat(seatless)
  return {'observed', now, joined and 1 or 0, f.tier or '', ended}
end)
