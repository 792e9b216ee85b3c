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

-- Lists a call under the gateway of its stream: score 1 once the call is released.
local function list_stream(call, attached)
  run_index('ZADD', K.gateway .. attached.gateway, attached.ending == '' and '0' or '1', call)
end

-- Records the stream of a call, and lists the call under its gateway.
local function set_stream(call, attached)
  local text = table.concat({attached.gateway, attached.id, attached.since, attached.ending}, ' ')
  run('HSET', K.call .. call, 'stage', '', REQUEST_IDS, '', 'stream', text)
  list_stream(call, attached)
end

-- Sets the order for the stream of a call, and notifies its gateway.
local function order_stream(call, record, attached, cause)
  attached.ending = cause
  set_stream(call, attached)
  record_event('ending', call, record.pod_name, '', record.merchant_id, cause)
  -- Without the permission to publish, the gateway learns of it by its next heartbeat.
  redis.pcall('PUBLISH', K.ending, attached.gateway)
end

-- Records the reason why a call could not use its pod; empty if the pod has not failed.
local function record_pod_failure(call, record, reason)
  if reason and reason ~= '' then
    record_event('pod_failed', call, record.pod_name, '', record.merchant_id, reason)
  end
end

-- Returns the cause of an attached call's end: that of the release, if it was released.
local function end_cause_of(attached, otherwise)
  return is_final[attached.ending] and attached.ending or otherwise
end

-- Returns the reply for an attached stream, as in attach.lua. `pod` is nil for an unknown pod.
local function attached_reply(record, pod, is_new, displaced)
  local address = pod and read('HGET', pod.key, 'address') or ''
  return {'attached', now, record.pod_name, address, pool_text(record.source_pool, pod and pod.tier),
    record.merchant_id, is_new, ordinal_of(record), displaced}
end

-- Marks an attached call as released: its gateway closes the stream and detaches it. The first final cause holds.
-- Returns the reply, as in release.lua.
local function end_stream(call, record, attached, cause)
  local pod_name = record.pod_name
  local pod = facts_of(pod_name)
  if attached.ending == '' or is_final[cause] and not is_final[attached.ending] then
    order_stream(call, record, attached, cause)
  end
  local source = pool_text(record.source_pool, pod and pod.tier)
  local pool = pod and pod.tier and pool_keys_of(pod.tier).source or source
  return {'released', now, pod_name, source, lasted(record.at), pool, pod and is_leaving(pod) and 1 or 0, 1}
end
