-- Appends a change of the number of pods of a workload to the event log.
-- ARGV[2..5]: origin, epoch, source pool, detail
-- Replies: {recorded, now}   {fenced, now, epoch}   {foreign, now, origin}
operation('record_scaling', function(ARGV)
  local _, origin, epoch, pool, detail = unpack(ARGV)
  local refused = fence(origin, epoch)
  if refused then return refused end
  record_event('scaled', '', '', pool, '', detail)
  return {'recorded', now}
end)
