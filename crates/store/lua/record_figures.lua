-- Records figures of streams, for replicas that do not relay them.
-- ARGV[2]: life of the figures (ms); then call and figures, in turn
-- Replies: {recorded, now}
operation('record_figures', function(ARGV)
  local _, life = unpack(ARGV)
  for i = 3, #ARGV, 2 do run('SET', K.figures .. ARGV[i], ARGV[i + 1], 'PX', life) end
  return {'recorded', now}
end)
