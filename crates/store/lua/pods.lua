-- Returns a page of pods and their calls.
-- ARGV[2..3]: cursor, approximate page size
-- Replies: {pods, now, next cursor, {pod, ...}}, each as in pod.lua
operation('pods', function(ARGV)
  local _, cursor, size = unpack(ARGV)
  local next_cursor, found = unpack(read('HSCAN', K.pod_metadata, cursor, 'COUNT', size))
  local rows = {}
  for i = 1, #found, 2 do
    -- A pod whose facts cannot be read is left out; the audit reports it.
    local is_readable, row = pcall(pod_row, found[i])
    if is_readable and row then rows[#rows + 1] = row end
  end
  return {'pods', now, next_cursor, rows}
end)
