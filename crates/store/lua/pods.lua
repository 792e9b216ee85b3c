-- Some pods and what they do.
-- ARGV[2..3]: cursor, about how many pods
-- Replies: {pods, now, next cursor, {pod, ...}}, each as in pod.lua
operation('pods', function(ARGV)
  local scanned = read('HSCAN', K.pod_metadata, ARGV[2], 'COUNT', ARGV[3])
  local rows = {}
  for i = 1, #scanned[2], 2 do
    -- A pod whose facts can't be read is left out; the audit reports it.
    local readable, row = pcall(pod_row, scanned[2][i])
    if readable and row then rows[#rows + 1] = row end
  end
  return {'pods', now, scanned[1], rows}
end)
