//! Does the comparison of scripts and model bite? Scripts broken on purpose must
//! be caught.

use store::Scripts;

use crate::compare::compare;

/// Scripts that are broken on purpose: which, what, how.
const MUTATIONS: [(&str, &str, &str); 52] = [
    ("a release frees a call that is on another pod", "on ~= '' and on ~= pod\n    or", ""),
    (
        "an ended call goes on counting",
        "    local left = try('ZREM', calls_key, leaver)\n",
        "    local left = try('ZSCORE', calls_key, leaver) and 1 or 0\n",
    ),
    ("a busy exclusive pod stays available", "elseif fit and f.calls == 0 then", "elseif fit then"),
    ("a pod registers one call too many", "if f.calls >= (kind", "if f.calls > (kind"),
    (
        "a later drain shortens an earlier one",
        "max(f.draining and before or 0, now + tonumber(time))",
        "now + tonumber(time)",
    ),
    ("a replaced pod keeps its calls", "if replaced or known", "if known"),
    ("a replaced leader may still write", "if epoch < current then", "if epoch + 1 < current then"),
    ("an ended call comes back by a renewal", "or run('ZSCORE', K.ended, call)", ""),
    (
        "a swept call leaves its pod busy",
        "if f then resettle(f, speaks_for(f, cause, time)) end",
        "",
    ),
    ("busy pods change their pool", "if f.calls > 0 or f.is_plain", "if f.is_plain"),
    (
        "a pod that is not ready any more still counts as plain",
        "'pin', pin, 'plain', '')",
        "'pin', pin)",
    ),
    (
        "a pod with a failure counts as one without",
        "'failures', failures, 'plain', plain(f))\n    return false",
        "'failures', failures)\n    return false",
    ),
    (
        "a plain pod forgets where it is pinned",
        "  if f.is_plain then\n    local pin",
        "  if false then\n    local pin",
    ),
    (
        "a pod that moves stays where it was, too",
        "  unplace(f)\n  f.tier = tier",
        "  f.tier = tier",
    ),
    ("pack is taken for spread", "kind.strategy == 'pack'", "false"),
    (
        "a pod that should go when idle cuts its calls",
        "departure == 'when_idle' and f.calls > 0",
        "false",
    ),
    (
        "a merchant has one call too many",
        "    if live >= wishes.max_calls then return 'max_calls' end",
        "    if live > wishes.max_calls then return 'max_calls' end",
    ),
    (
        "an ended call counts against its merchant",
        "if merchant ~= '' then view('ZREM', live_key(merchant), call) end",
        "",
    ),
    (
        "a rate counts one call too few",
        "'LINDEX', rate_key(merchant), wishes.max_rate - 1)",
        "'LINDEX', rate_key(merchant), wishes.max_rate)",
    ),
    (
        "a refused call counts as one of the second",
        "  local limit = document and not q.is_rescue and exceeded(q.merchant, wishes)\n",
        "  local limit = document and not q.is_rescue and exceeded(q.merchant, wishes)\n  admit(q, wishes)\n",
    ),
    (
        "a start takes a pod that has another call",
        "or not f or f.calls >= cap_of(f) then",
        "or not f or not serving(f) then",
    ),
    (
        "a start ends no waiting",
        "    run('HSET', K.call .. call, 'stage', '', 'attempt', '')\n    if f then",
        "    if f then",
    ),
    ("a call that ended in order comes back by its start", "or missed.cause ~= 'unconfirmed'", ""),
    (
        "who comes last is served first",
        "'ZPOPMIN', names_of(f.tier).queue",
        "'ZPOPMAX', names_of(f.tier).queue",
    ),
    ("priorities do not count", "local score = -priority * RULES.PRIORITY_STEP +", "local score ="),
    (
        "a call that was served goes on waiting",
        "  unqueue(call, place.merchant, place.pools, but)\n",
        "",
    ),
    (
        "a free pod is not handed to those who wait",
        "  while serve_one(f) do placed, f.stands = true, nil end\n",
        "",
    ),
    (
        "the lease of a pod that was handed over does not begin",
        "extend(f, call, now + q.lease, nil, record.merchant_id)\n      run('HSET'",
        "run('HSET'",
    ),
    (
        "a call that asks again loses its place all the same",
        "set_poll_by(call, place, next_poll(place.ends, q.patience))",
        "false",
    ),
    (
        "one call too many waits",
        "count('ZCARD', K.waiting) < q.most and",
        "count('ZCARD', K.waiting) <= q.most and",
    ),
    (
        "one call too many of a merchant waits",
        "not (theirs and count('ZCARD', theirs) >= q.most_per_merchant)",
        "not (theirs and count('ZCARD', theirs) > q.most_per_merchant)",
    ),
    (
        "a call whose pod has gone before it came for it is forgotten",
        "  set_place(call, place)\n  return place\n",
        "  return place\n",
    ),
    ("a call waits although its time is over", "if now >= place.ends then", "if false then"),
    (
        "the end of the first attempt ends the second",
        "or number ~= '' and tonumber(number) ~= (tonumber(record.attempts) or 0) then",
        "then",
    ),
    (
        "a broken call goes back to the same pod",
        "any ~= avoid and usable(any, tier, 1)",
        "usable(any, tier, 1)",
    ),
    (
        "a call is given pods without end",
        "is_last = tonumber(number) > tonumber(retries)",
        "is_last = false",
    ),
    (
        "a release after the end of the stream is not heard",
        "        explain(call, ended, cause)\n",
        "",
    ),
    (
        "a whole pool may be in quarantine",
        "3, 3) + 1) * RULES.QUARANTINE_SHARE >",
        "3, 3) + 1) * 1 >",
    ),
    ("a success does not end a quarantine", "  set_health(f, 0)\n  return was", "  return was"),
    (
        "a pod keeps the lease of its last call",
        ", K.lease .. f.pod)\n    f.unleased",
        ")\n    f.unleased",
    ),
    (
        "a record without what is usual keeps what was there",
        "if not c.record and c.tried == ''",
        "if c.tried == '' or c.stage == ''",
    ),
    ("the lease names the wrong call", "run('ZREVRANGE'", "run('ZRANGE'"),
    ("refusals are told as something else", "tell('refused',", "tell('waiting',"),
    ("ends are told with the wrong cause", "cause .. ' ' .. text_of(time)", "'agent 0'"),
    ("a new pod is not told", "    tell('joined',", "    local _ = ('joined'):format("),
    (
        "a waiting call is connected to a pod that left service",
        "local place = not (f and serving(f)) and requeue(",
        "local place = false and requeue(",
    ),
    (
        "who waits is found by the wrong merchant",
        "\n      '', place.merchant\n",
        "\n      '', ''\n",
    ),
    (
        "a replay is given a pod",
        "if not q.record and run('EXISTS', key) == 1 then",
        "if false then",
    ),
    (
        "a repeat is refused while its call lives",
        "if not q.record and run('EXISTS', key) == 1 then",
        "if run('EXISTS', key) == 1 then",
    ),
    ("a place may be asked for again by a replay", "{waiting = true, over", "{over"),
    (
        "a signature is remembered for ever",
        "run('SET', key, '1', 'PX', window)",
        "run('SET', key, '1')",
    ),
    (
        "ended calls are remembered for too long",
        "'PX', RULES.CALL_HISTORY_TTL)",
        "'PX', RULES.CALL_HISTORY_TTL + 20000)",
    ),
];

#[tokio::test]
async fn the_comparison_catches_scripts_that_are_broken_on_purpose() {
    let whole = Scripts::default().library.code;
    for (what, from, _) in MUTATIONS {
        assert!(whole.contains(from), "{what}: no script contains {from:?}");
    }
    for (what, from, to) in MUTATIONS {
        let scripts = || Scripts::edited(|code| code.replace(from, to));
        let caught = compare(7, 40_000, scripts).await;
        assert!(caught.is_err(), "not caught: {what}");
        println!("caught: {what}: {}", caught.unwrap_err().lines().next().unwrap_or_default());
    }
}
