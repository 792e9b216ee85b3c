-- Renames the fields of call records that have the names of the other schema, one page of an index per step. The index
-- of waiting calls is the last; its last page ends the migration.
-- ARGV[2..4]: index (calls, waiting), cursor, approximate page size
-- Replies: {migrated, now, next cursor, records renamed}

-- Time (ms) for which libraries of the previous version stay guarded after a migration.
local GUARD_TTL = '86400000'

operation('migrate_calls', function(ARGV)
  local _, index, cursor, size = unpack(ARGV)
  local scanned = try('ZSCAN', P .. index, cursor, 'COUNT', size)
  -- The audit replaces an index of the wrong type; its records are renamed when their calls are next used.
  if scanned.err then scanned = {'0', {}} end
  local next_cursor, found = unpack(scanned)

  local function rename(call)
    local request_ids, pod_attempt = fields_of(call, REQUEST_IDS, POD_ATTEMPT)
    if not request_ids and not pod_attempt then
      request_ids, pod_attempt = fields_of_other_schema(call)
      return (request_ids or pod_attempt) and true or false
    end
    local removed = try('HDEL', K.call .. call, OTHER_REQUEST_IDS, OTHER_POD_ATTEMPT)
    return type(removed) == 'number' and removed > 0
  end

  local renamed = 0
  for i = 1, #found, 2 do
    if rename(found[i]) then renamed = renamed + 1 end
  end
  if index == 'waiting' and next_cursor == '0' and try('GET', K.migration) == 'renaming' then
    run('SET', K.migration, 'done', 'PX', GUARD_TTL)
  end
  return {'migrated', now, next_cursor, renamed}
end)
