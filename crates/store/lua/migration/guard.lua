-- Guards a library of the previous version, which knows schema 1 only. This text is inserted after the first line of
-- its code, which then registers its functions by register_guarded. The guard records the last use of the store, and
-- refuses functions from schema 2 on, so that a router of the previous version that was paused during the migration
-- cannot write records whose fields it does not know. `begin` still runs: it makes that router report the schema and
-- stop using the store.
local function register_guarded(definition, callback)
  if callback then definition = {function_name = definition, callback = callback} end
  local work, name, flags = definition.callback, definition.function_name, definition.flags
  definition.description = 'guarded'
  definition.callback = function(keys, args)
    if string.find(name, '^smart_router_begin_') then return work(keys, args) end
    local schema, state = unpack(redis.call('MGET', keys[1] .. 'schema', keys[1] .. 'migration'))
    if schema and schema ~= '1' then
      return redis.error_reply('MISCONF the layout of the store has schema ' .. schema .. ': use a newer release')
    end
    local is_read_only = flags and flags[1] == 'no-writes'
    if not is_read_only and state ~= 'held' then
      local clock = redis.call('TIME')
      local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
      local used_at = tonumber(state or '')
      if not used_at or math.abs(now - used_at) >= 100 then
        redis.call('SET', keys[1] .. 'migration', string.format('%d', now))
      end
    end
    return work(keys, args)
  end
  redis.register_function(definition)
end
