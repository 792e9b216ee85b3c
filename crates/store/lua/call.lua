-- Returns a call.
-- ARGV[2]: call
-- Replies: {call, now, row}, as in call_row.lua   {not_found, now}
operation('call', function(ARGV)
  local _, call = unpack(ARGV)
  local row = call_row(call)
  return row and {'call', now, row} or {'not_found', now}
end)
