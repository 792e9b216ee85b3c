-- Changes the schema of the store from 1 to 2, once no router of the previous version has used it for a time. The guard
-- in the previous version's library records the last use (migration/guard.lua).
-- ARGV[2]: quiet period (ms)
-- Replies: {migrated, now}   {unchanged, now, schema}: the schema is not 1
--          {waiting, now, last use (ms)}   {held, now}: voice:migration is `held`, set by hand
operation('migrate', function(ARGV)
  local _, quiet_period = unpack(ARGV)
  local schema = read('GET', K.schema)
  if schema ~= '1' then return {'unchanged', now, schema or ''} end
  local state = try('GET', K.migration)
  if state == 'held' then return {'held', now} end
  local used_at = type(state) == 'string' and tonumber(state)
  if used_at and used_at > now then
    -- The clock was set back.
    used_at = now
    run('SET', K.migration, text_of(now))
  end
  if used_at and now < used_at + tonumber(quiet_period) then return {'waiting', now, used_at} end
  run('SET', K.schema, SCHEMA)
  run('SET', K.migration, 'renaming')
  return {'migrated', now}
end)
