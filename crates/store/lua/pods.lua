-- Some pods and what they do.
-- ARGV[2..3]: cursor, about how many pods
-- Replies: {pods, now, next cursor, {pod, ...}}, each as in pod.lua
operation('pods', function(ARGV)
  local _, cursor, size = unpack(ARGV)
  local next_cursor, found = unpack(read('HSCAN', K.pod_metadata, cursor, 'COUNT', size))
  local rows = {}
  for i = 1, #found, 2 do
    -- A pod whose facts can't be read is left out; the audit reports it.
    local readable, row = pcall(pod_row, found[i])
    if readable and row then rows[#rows + 1] = row end
  end
  return {'pods', now, next_cursor, rows}
end)
