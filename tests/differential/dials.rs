//! Reservations and the limits of dials: operations, reads and mutations.

use fleet::{ReservationQuery, Reserved, WaitingDials, merchant::Malformed, names::MerchantId};
use store::OutboundStore;
use testkit::operations::{OutboundOperation, RESERVATION_TTL};

use crate::compare::{Pair, chosen};

const ACTOR: &str = "admin (token 2)";

/// Replaces the error of a malformed document, which the stores word differently.
fn plain(reserved: Reserved) -> Reserved {
    let malformed_merchant = reserved.malformed_merchant.map(|_| Malformed::new("malformed"));
    Reserved { malformed_merchant, ..reserved }
}

impl Pair {
    pub(super) async fn run_outbound(
        &mut self,
        operation: &OutboundOperation,
    ) -> Result<(), String> {
        let (store, fleet, now) = (self.store.clone(), &mut self.fleet, self.now);
        let what = format!("{operation:?}");
        let failed = |error: store::StoreError| format!("the store failed: {error}");
        match operation {
            OutboundOperation::Reserve(request) => {
                let redis = store.reserve(request).await.map_err(failed)?;
                let granted = redis.granted.len();
                same!(what, plain(redis), plain(fleet.reserve(request, now)));
                // The refused dials wait; those of the same router before are served.
                let waiting: Vec<WaitingDials> = (granted < request.ids.len())
                    .then(|| WaitingDials {
                        merchant: request.merchant.clone(),
                        number: request.number.clone(),
                        dials: (request.ids.len() - granted) as u64,
                    })
                    .into_iter()
                    .collect();
                let router = format!("r{}", request.ids.len() % 3);
                store.report_waiting_dials(&router, &waiting).await.map_err(failed)?;
                fleet.report_waiting_dials(&router, &waiting, now);
            }
            OutboundOperation::Dialed { id, call } => {
                let redis = store.dialed(id, call, RESERVATION_TTL).await.map_err(failed)?;
                same!(what, redis, fleet.dialed(id, call, RESERVATION_TTL, now));
            }
            OutboundOperation::GiveBack { id } => {
                let redis = store.give_back(id).await.map_err(failed)?;
                fleet.prefer(chosen(&store).await?);
                same!(what, redis, fleet.give_back(id, now));
            }
            OutboundOperation::Number { number, max_lines } => {
                let redis = store.set_number(number, *max_lines, ACTOR).await.map_err(failed)?;
                same!(what, redis, fleet.set_number(number, *max_lines, ACTOR));
            }
            OutboundOperation::Account { account, max_cps } => {
                let redis = store.set_account(account, *max_cps, ACTOR).await.map_err(failed)?;
                same!(what, redis, fleet.set_account(account, *max_cps, ACTOR));
            }
            OutboundOperation::Waiting { router, waiting } => {
                store.report_waiting_dials(router, waiting).await.map_err(failed)?;
                fleet.report_waiting_dials(router, waiting, now);
            }
        }
        Ok(())
    }

    /// Compares reservations, limits, held slots and learned answer rates.
    pub(super) async fn outbound_agrees(&mut self) -> Result<(), String> {
        let failed = |error: store::StoreError| error.to_string();
        let outbound = self.store.outbound().await.map_err(failed)?;
        same!("outbound", outbound.status, self.fleet.outbound_status());
        let numbers = self.store.numbers().await.map_err(failed)?;
        same!("numbers", numbers, self.fleet.numbers());
        for found in numbers {
            let alone = self.store.number(&found.number).await.map_err(failed)?;
            same!("number", alone, Some(found));
        }
        same!("accounts", outbound.accounts, self.fleet.accounts());
        let demand = self.store.dial_demand().await.map_err(failed)?;
        same!("demand of dials", demand, self.fleet.dial_demand(self.now));
        for number in 0..3 {
            let merchant: MerchantId = format!("m{number}").parse().unwrap();
            let redis = self.store.answer_probability(&merchant).await.map_err(failed)?;
            let ours = self.fleet.answer_probability(&merchant, self.now);
            same!(format!("answer probability of {merchant}"), redis, ours);
            let merchant = (number > 0).then_some(merchant);
            let query = ReservationQuery { merchant, after: None, limit: 100 };
            let redis = self.store.reservations(&query).await.map_err(failed)?;
            same!(format!("{query:?}"), redis, self.fleet.reservations(&query, self.now));
            for found in redis.reservations {
                let alone = self.store.reservation(&found.id).await.map_err(failed)?;
                same!("reservation", alone, Some(found));
            }
        }
        Ok(())
    }
}

/// Broken builds: description, text of the library, replacement.
pub(super) const DIAL_MUTATIONS: [(&str, &str, &str); 56] = [
    (
        "a call without a reservation takes a held slot",
        "not outbound.is_open(step.tier) then\n      pod, reason",
        "false then\n      pod, reason",
    ),
    (
        "a waiting call takes a held slot",
        "  if not outbound.is_open(pod.tier, pod.keeps_count and 1 or 0) then",
        "  if false then",
    ),
    (
        "a requeued call takes a held slot",
        "(outbound.is_dialed(entry.score) or outbound.is_open(tier))",
        "true",
    ),
    (
        "a grant ignores the inbound reserve",
        "local number = slots >= reserve and fitting_dials(dials, rate, left, slots - reserve, target) or 0",
        "local number = fitting_dials(dials, rate, left, slots, target)",
    ),
    (
        "dials do not count as calls of their merchant",
        "  run_index('ZADD', dials_key(facts.merchant), unpack(deadlines))\n",
        "",
    ),
    (
        "the end of a reservation leaves a call of its merchant",
        "  run_index('ZREM', dials_key(facts.merchant), facts.id)\n",
        "",
    ),
    (
        "the end of a reservation leaves its line",
        "  outbound.free_line(facts.number, facts.id)\n",
        "",
    ),
    (
        "the end of a call leaves its line",
        "  outbound.free_line(record.number, 'call:' .. call)\n",
        "",
    ),
    (
        "a call that leaves the queue keeps its line",
        "  outbound.free_line(entry.number, 'call:' .. call)\n",
        "",
    ),
    ("a reconnecting call loses its line", "  request.number = record.number\n", ""),
    (
        "a reservation is used twice",
        "  if request.dial then outbound.finish(request.dial, 'answered', request.call) end\n",
        "",
    ),
    (
        "a reservation of another merchant is used",
        "if request.merchant ~= '' and request.merchant ~= facts.merchant then",
        "if false then",
    ),
    (
        "an expired reservation is used",
        "return facts and facts.ends > now and facts or nil",
        "return facts",
    ),
    (
        "grants of an account are not spaced",
        "if now < last + interval then return account, 0, last + interval - now end",
        "",
    ),
    (
        "a batch exceeds the rate of its account",
        "      return account, 1, interval\n",
        "      return account, 2, interval\n",
    ),
    (
        "the lines of a number are exceeded by a batch",
        "  bound(lines_room(number, #ids), 'max_lines')\n",
        "  bound(lines_room(number, #ids) and lines_room(number, #ids) > 0 and #ids or 0, 'max_lines')\n",
    ),
    (
        "a failed dial counts as answered",
        "record_dial_ended(ended, answers, cause == 'answered', ",
        "record_dial_ended(ended, answers, true, ",
    ),
    (
        "many outstanding dials do not lengthen the memory of the answer rate",
        "cause == 'answered', max(0, dials.dials))",
        "cause == 'answered', 0)",
    ),
    (
        "outstanding dials beyond the ended ones do not raise the probability",
        "rate.answers, dials.dials + number)",
        "rate.answers, 0)",
    ),
    (
        "a grant overtakes waiting callers",
        "not (has_waiting_calls and count('ZCARD', pool_keys_of(tier).queue) > 0)",
        "true",
    ),
    (
        "a late confirmation loses the line",
        "pod_attempt = attempt, number = call_end.number}",
        "pod_attempt = attempt}",
    ),
    (
        "a repeated request grants again",
        "  return #granted > 0 and {'reserved', now, text_of(ends), '', 0, malformed, granted} or nil\n",
        "  return nil\n",
    ),
    (
        "another miss target leaves the held slots of other pools",
        "  if known_target ~= target then change_target(target) end\n",
        "  run_index('HSET', K.dials, ':target', text_of(target))\n",
    ),
    (
        "a call becomes the dial of a second reservation",
        "if other and other.call == call then return {'other_reservation', now, owner} end",
        "",
    ),
    (
        "a call in progress becomes the dial of a reservation",
        "  if run('EXISTS', K.call .. call) == 1 then return {'in_progress', now} end\n",
        "",
    ),
    (
        "an account whose limit was deleted forgets its last dial",
        "      run('HDEL', key, name)\n",
        "      run('HDEL', key, name)\n      run_index('HDEL', K.last_dials, name)\n",
    ),
    (
        "the first reported call still ends the reservation",
        "  if facts.call ~= '' and try('GET', K.dial .. facts.call) == id then\n    run('DEL', K.dial .. facts.call)\n",
        "  if false then\n    run('DEL', K.dial .. facts.call)\n",
    ),
    (
        "a reported dial keeps the deadline of its grant",
        "facts.call, facts.ends = call, now + tonumber(lifetime)",
        "facts.call = call",
    ),
    (
        "a repeated report of a dial extends its reservation",
        "  if facts.call == call then return {'dialed', now, text_of(facts.ends)} end\n",
        "",
    ),
    (
        "a reported dial is swept at the deadline of its grant",
        "  run_index('ZADD', K.reservations, deadline, id)\n",
        "",
    ),
    (
        "a batch exceeds max_calls",
        "outbound.calls_room(merchant, config.max_calls, #ids), 'max_calls')",
        "outbound.calls_room(merchant, config.max_calls, #ids) == 0 and 0 or nil, 'max_calls')",
    ),
    (
        "a repeat of a refused answer has no reservation",
        "    outbound.set_missed_answer(request.call, request.reserved)\n",
        "",
    ),
    (
        "a call that was served repeats its answer",
        "    run('DEL', K.missed_answer .. request.call)\n",
        "",
    ),
    (
        "any call repeats a refused answer",
        "  local facts = known == id and outbound.parse(id, record)\n",
        "  local facts = outbound.parse(id, record)\n",
    ),
    (
        "of the free slots of one pod only some count",
        "slots + (counted - pods) * (cap - calls), counted",
        "slots + (counted - pods) * math.min(cap - calls, 64), counted",
    ),
    (
        "free slots are counted exactly for few numbers of calls",
        "for _ = 1, RULES.MAX_COUNTED_LOADS do",
        "for _ = 1, RULES.MAX_COUNTED_LOADS - 1 do",
    ),
    (
        "pods with many different numbers of calls have no free slot",
        "  return slots + count('ZCOUNT', key, '-inf', '(' .. cap) - pods\n",
        "  return slots\n",
    ),
    (
        "an account without calls per second allows dials",
        "    if limit == 0 then return account, 0, RULES.DIAL_RETRY end\n",
        "    if limit == 0 then return account, nil, 0 end\n",
    ),
    (
        "the limit of a provider does not apply to its accounts",
        "  for account in string.gmatch(accounts, '%S+') do\n    local limit = limit_of(K.accounts",
        "  for account in string.gmatch(accounts, '^%S+') do\n    local limit = limit_of(K.accounts",
    ),
    (
        "a batch that the pods limit names no limit",
        "  if left > 0 then limit, wait = pod_limit, RULES.DIAL_RETRY end\n",
        "",
    ),
    (
        "an answer rate is kept for too long",
        "'PX', text_of(RULES.ANSWER_RATE_TTL))",
        "'PX', text_of(RULES.ANSWER_RATE_TTL + 1))",
    ),
    (
        "a reservation expires a millisecond late",
        "return facts and facts.ends > now and facts or nil",
        "return facts and facts.ends >= now and facts or nil",
    ),
    (
        "an expired dial does not lower the answer rate",
        "if cause == 'answered' or facts.call ~= '' then",
        "if cause ~= 'expired' and (cause == 'answered' or facts.call ~= '') then",
    ),
    (
        "an expired reservation leaves the slot of a waiting call",
        "    outbound.end_reservation(facts, 'expired')",
        "    outbound.finish(facts, 'expired')",
    ),
    (
        "an expired reservation is listed until the sweep",
        "    if facts and facts.ends > now then\n      rows",
        "    if facts then\n      rows",
    ),
    (
        "a sweep forgets that slots are held",
        "if outstanding == 0 and has_dials then",
        "if has_dials then",
    ),
    (
        "a reservation that was not dialed lowers the answer rate",
        "if cause == 'answered' or facts.call ~= '' then",
        "if true then",
    ),
    (
        "freed slots are not handed off to waiting calls",
        "  outbound.finish(facts, cause)\n  outbound.hand_off_pool(facts.tier)\n",
        "  outbound.finish(facts, cause)\n",
    ),
    (
        "a report of waiting dials replaces that of another router",
        "run('HSET', key, router, ends",
        "run('HSET', key, 'router', ends",
    ),
    (
        "a report of waiting dials is in force for too long",
        "  return now < ends and ends <= now + RULES.WAITING_DIALS_TTL\n",
        "  return now <= ends\n",
    ),
    ("a router without waiting dials keeps its report", "    run('HDEL', key, router)\n", ""),
    (
        "waiting dials beyond the lines of their number need pods",
        "waiting = waiting + within_lines(number, dials) end",
        "waiting = waiting + dials end",
    ),
    (
        "waiting dials beyond the calls of their merchant need pods",
        "waiting = math.min(waiting, outbound.calls_room(merchant, config.max_calls, 0))",
        "waiting = waiting",
    ),
    (
        "waiting dials are not weighted by their answer probability",
        "waiting * ARITHMETIC.answer_probability(dials, answers, 0)",
        "waiting * 1024",
    ),
    (
        "waiting dials count for a pool without pods",
        "if step.kind and (is_defined(step.tier) or count('SCARD', pool_keys_of(step.tier).assigned) > 0) then",
        "if step.kind then",
    ),
    (
        "a report counts any number of waiting dials",
        "math.min(tonumber(dials), RULES.MAX_WAITING_DIALS)",
        "tonumber(dials)",
    ),
];
