-- Changes the schema of the store from 1 to 2 after a quiet period without a use by a router of the previous version.
-- The guard in the library of that version records its last use in voice:migration (migration/guard.lua); without such
-- a record the quiet period begins with the first call of this function.
-- ARGV[2..3]: quiet period (ms), may the schema change, because all such libraries are guarded (1, 0)
-- Replies: {migrated, now}   {unchanged, now, schema}: the schema is not 1   {quiet, now}: the quiet period is not over
--          {waiting, now}: a router of the previous version has used the store   {held, now}: held by hand
operation('migrate', function(ARGV)
  local _, quiet_period, may_change = unpack(ARGV)
  local schema = read('GET', K.schema)
  if schema ~= '1' then return {'unchanged', now, schema or ''} end
  local state = try('GET', K.migration)
  state = type(state) == 'string' and state or ''
  if state == 'held' then return {'held', now} end
  local used_at = tonumber(state)
  local since = used_at or tonumber(string.match(state, '^quiet (%d+)$'))
  if not since or since > now then
    -- No record, or the clock was set back.
    since = now
    run('SET', K.migration, 'quiet ' .. text_of(now))
  end
  if may_change ~= '1' or now < since + tonumber(quiet_period) then return {used_at and 'waiting' or 'quiet', now} end
  run('SET', K.schema, SCHEMA)
  run('SET', K.migration, 'renaming')
  return {'migrated', now}
end)
