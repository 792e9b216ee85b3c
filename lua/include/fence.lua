-- fence: refuses the writes of a leader that has been replaced. ARGV[3] is the
-- leader's epoch, empty for a writer without a lease.
if ARGV[3] ~= '' then
  local current = redis.pcall('GET', P .. 'leader:epoch')
  -- What is no number is nobody's.
  current = type(current) == 'string' and tonumber(current) or 0
  if tonumber(ARGV[3]) < current then
    return {'fenced', now, current}
  end
  if tonumber(ARGV[3]) > current then
    redis.call('SET', P .. 'leader:epoch', ARGV[3])
  end
end
