#!lua flags=allow-oom
-- The epoch of the leader's writes. A larger one is adopted: from then on the
-- writes of those before are refused.
-- ARGV[3]: epoch, '' to ask only
-- Replies: {epoch, now, epoch}   {fenced, now, epoch}
-- include: base
-- include: fence
return {'epoch', now, tonumber(redis.call('GET', P .. 'leader:epoch') or 0)}
