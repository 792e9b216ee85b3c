-- Forgets a pod that has left, with its calls.
-- ARGV[2..6]: origin, epoch, pod, uid, departure (now, when_idle)
-- Replies: {gone, now, {call, source pool, lasted, ...}}   {busy, now}   {not_there, now}
--          {fenced, now, epoch}   {foreign, now, origin}
operation('remove_pod', function(ARGV)
  local _, origin, epoch, pod, uid, departure = unpack(ARGV)
  local refused = fence(origin, epoch)
  if refused then return refused end
  local f = facts_of(pod)
  if not f or uid_of(f) ~= uid then return {'not_there', now} end
  if departure == 'when_idle' and f.calls > 0 then return {'busy', now} end
  read_table(f.tier)
  local ended, seatless = end_calls(f)
  unplace(f)
  run('DEL', K.pod .. f.pod, K.pod_tier .. f.pod, K.pod_draining .. f.pod,
    K.lease .. f.pod, f.calls_key)
  view('ZREM', K.draining, f.pod)
  view('ZREM', K.quarantined, f.pod)
  view('HDEL', K.pod_metadata, f.pod)
  tell('gone', '', f.pod, '')
  announce_drain(f.pod)
  reseat(seatless)
  return {'gone', now, ended}
end)
