-- streams: media streams of calls, and the gateways that relay them.

-- Returns the end of a gateway's lease and its length (ms) from its entry; nil for a malformed entry.
local function lease_of(entry)
  local ends, lease = string.match(entry, '^(%d+) (%d+)$')
  return tonumber(ends), tonumber(lease)
end

-- Sets the end of a gateway's lease.
local function set_gateway(gateway, ends, lease)
  run_index('HSET', K.gateways, gateway, text_of(ends) .. ' ' .. text_of(lease))
end

-- Records the stream of a call, and lists the call under its gateway: score 1 once the call is released.
local function set_stream(call, attached)
  local text = table.concat({attached.gateway, attached.id, attached.since, attached.ending}, ' ')
  run('HSET', K.call .. call, 'stage', '', REQUEST_IDS, '', 'stream', text)
  run_index('ZADD', K.gateway .. attached.gateway, attached.ending == '' and '0' or '1', call)
end

-- Marks an attached call as released, once: its gateway closes the stream and detaches it. Returns the reply, as in
-- release.lua.
local function end_stream(call, record, attached, cause)
  local pod_name = record.pod_name
  local pod = facts_of(pod_name)
  if attached.ending == '' then
    attached.ending = cause
    set_stream(call, attached)
    record_event('ending', call, pod_name, '', record.merchant_id, cause)
    -- Without the permission to publish, the gateway learns of it by its next heartbeat.
    redis.pcall('PUBLISH', K.ending, attached.gateway)
  end
  local source = pool_text(record.source_pool, pod and pod.tier)
  local pool = pod and pod.tier and pool_keys_of(pod.tier).source or source
  return {'released', now, pod_name, source, lasted(record.at), pool, pod and is_leaving(pod) and 1 or 0, 1}
end
