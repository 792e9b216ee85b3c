//! The limits of a grant: pods, calls of the merchant, lines of the number, calls per second of the
//! account. They are checked in one step.

use std::collections::BTreeMap;

use super::{Change, DialLimit, Fleet, Reserve, outbound_facts::held_slots};
use crate::{
    Millis, merchant,
    names::{AccountName, MerchantId, PhoneNumber, Pool},
    outbound::{AnswerRate, DialSums},
    rules::PROBABILITY_UNIT,
    rules::{DIAL_RETRY, MAX_COUNTED_LOADS},
};

/// Grants in one pool.
pub(super) struct PlannedDials {
    pub(super) pool: Pool,
    pub(super) count: usize,
    pub(super) probability: u64,
}

/// The grants that the limits allow.
pub(super) struct DialPlan {
    /// Reservations per pool, in the order of the chain.
    pub(super) pools: Vec<PlannedDials>,
    /// The limit that refuses the others.
    pub(super) limit: Option<DialLimit>,
    pub(super) retry_after: Millis,
    /// The account whose rate limit counts the grants.
    pub(super) account: Option<AccountName>,
}

/// Shortest time between two grants of an account (ms): evenly spaced, so that no second has more
/// than `max_cps`.
fn dial_interval(max_cps: u32) -> Millis {
    1_000_u64.div_ceil(u64::from(max_cps.max(1)))
}

/// Free slots of the pods of an index, of which each has `cap`. The pods with the fewest calls
/// count first; beyond [`MAX_COUNTED_LOADS`] different numbers of calls each pod counts as one slot.
pub(super) fn free_slots(levels: &BTreeMap<usize, usize>, cap: usize) -> u64 {
    let free = |(at, (calls, pods)): (usize, (&usize, &usize))| {
        let slots = if at < MAX_COUNTED_LOADS { cap - calls } else { 1 };
        (slots * pods) as u64
    };
    levels.range(..cap).enumerate().map(free).sum()
}

/// How many further dials of a merchant a pool can hold within `room` slots, at most `wanted`.
fn fitting_dials(
    before: DialSums,
    rate: AnswerRate,
    wanted: usize,
    room: u64,
    miss_target: u32,
) -> usize {
    let fits = |count: usize| {
        let mut sums = before;
        let count = count as u64;
        sums.dials += count;
        let probability = rate.probability_among(sums.dials);
        sums.probability += count * probability;
        sums.variance += count * probability * (PROBABILITY_UNIT - probability);
        held_slots(sums, miss_target) <= room
    };
    if fits(wanted) {
        return wanted;
    }
    let (mut fitting, mut excess) = (0, wanted);
    while excess - fitting > 1 {
        let middle = (fitting + excess) / 2;
        if fits(middle) {
            fitting = middle;
        } else {
            excess = middle;
        }
    }
    fitting
}

impl Fleet {
    pub(super) fn plan_dials(&self, request: &Reserve, now: Millis) -> DialPlan {
        let accounts = &self.outbound.accounts;
        let account = request.accounts.iter().find(|account| accounts.contains_key(*account));
        let mut plan =
            DialPlan { pools: Vec::new(), limit: None, retry_after: 0, account: account.cloned() };
        let (cps_room, cps_retry) = self.dial_rate_room(account, now);
        let mut allowed = request.ids.len();
        for (room, limit) in [
            (self.max_calls_room(&request.merchant), DialLimit::MaxCalls),
            (self.lines_room(request.number.as_ref()), DialLimit::MaxLines),
            (cps_room, DialLimit::MaxCps),
        ] {
            if room < allowed {
                (allowed, plan.limit) = (room, Some(limit));
            }
        }
        let retry_after =
            if plan.limit == Some(DialLimit::MaxCps) { cps_retry } else { DIAL_RETRY };
        let left = self.fill_pools(request, allowed, &mut plan, now);
        plan.retry_after = match plan.limit {
            None => 0,
            Some(_) if left > 0 => DIAL_RETRY,
            Some(_) => retry_after,
        };
        plan
    }

    /// Distributes grants over the pools of the chain. Returns how many found no room.
    fn fill_pools(
        &self,
        request: &Reserve,
        allowed: usize,
        plan: &mut DialPlan,
        now: Millis,
    ) -> usize {
        let rate = self.outbound.answer_rate(&request.merchant, now);
        let config = self.merchant_config_of(Some(&request.merchant));
        let mut left = allowed;
        let mut limit = DialLimit::Capacity;
        for step in merchant::chain(&self.tiers, config) {
            if left == 0 {
                break;
            }
            let pool = self.tiers.resolve(step).filter(|pool| self.tiers.kind(pool).is_some());
            let Some(pool) = pool else { continue };
            // Waiting callers precede diallers.
            let is_known = plan.pools.iter().any(|planned| planned.pool == pool);
            if is_known || self.queue.len_of(&pool) > 0 {
                continue;
            }
            let (slots, reserve) = (self.counted_slots(&pool), self.reserved_slots(&pool));
            let sums = self.outbound.dials_in(&pool).sums;
            let fitting = |room| fitting_dials(sums, rate, left, room, request.miss_target);
            let count = slots.checked_sub(reserve).map_or(0, fitting);
            if count < left && reserve > 0 && fitting(slots) > count {
                limit = DialLimit::InboundReserve;
            }
            if count > 0 {
                left -= count;
                let probability = rate.probability_among(sums.dials + count as u64);
                plan.pools.push(PlannedDials { pool, count, probability });
            }
        }
        if left > 0 {
            plan.limit = Some(limit);
        }
        left
    }

    /// Free slots of a pool.
    pub(super) fn counted_slots(&self, pool: &Pool) -> u64 {
        let cap = self.tiers.kind(pool).map_or(0, |kind| kind.cap() as usize);
        let levels = self.pools.get(pool).into_iter().flat_map(|index| &index.levels);
        levels.map(|levels| free_slots(levels, cap)).sum()
    }

    /// Slots of a pool that are kept for inbound calls.
    fn reserved_slots(&self, pool: &Pool) -> u64 {
        let in_service = self.pools.get(pool).map_or(0, |index| index.in_service() as u64);
        let cap = self.tiers.kind(pool).map_or(0, |kind| u64::from(kind.cap()));
        self.tiers.bounds(pool).inbound_reserve.of_slots(in_service * cap)
    }

    /// Whether a call without a reservation may use a free slot of the pool: more are free than are
    /// held for dials.
    pub(super) fn is_open(&self, pool: &Pool) -> bool {
        let held = self.outbound.dials_in(pool).held;
        held == 0 || self.counted_slots(pool) > held
    }

    pub(super) fn max_calls_room(&self, merchant: &MerchantId) -> usize {
        let config = self.merchant_config_of(Some(merchant));
        let Some(max) = config.and_then(|config| config.limits.max_calls) else {
            return usize::MAX;
        };
        let live = self.merchant_calls.get(merchant).copied().unwrap_or(0);
        (max as usize).saturating_sub(live)
    }

    pub(super) fn lines_room(&self, number: Option<&PhoneNumber>) -> usize {
        let Some(number) = number else { return usize::MAX };
        let max = self.outbound.numbers.get(number);
        max.map_or(usize::MAX, |max| (*max as usize).saturating_sub(self.outbound.lines(number)))
    }

    /// How many dials the account allows now, and the time until it allows the next one.
    fn dial_rate_room(&self, account: Option<&AccountName>, now: Millis) -> (usize, Millis) {
        let known = account.and_then(|it| Some((it, *self.outbound.accounts.get(it)?)));
        let Some((account, max_cps)) = known else { return (usize::MAX, 0) };
        let interval = dial_interval(max_cps);
        let next = self.outbound.last_dial(account) + interval;
        match max_cps {
            0 => (0, DIAL_RETRY),
            _ if now < next => (0, next - now),
            _ => (1, interval),
        }
    }

    /// Sets or deletes the limit of lines of a number. Returns whether it had one.
    pub fn set_number(&mut self, number: &PhoneNumber, max_lines: Option<u32>, by: &str) -> bool {
        let known = self.outbound.numbers.get(number).copied();
        if known != max_lines {
            let (number, by) = (number.clone(), by.to_owned());
            self.record(Change::Number { number, max_lines, by });
        }
        known.is_some()
    }

    /// Sets or deletes the rate limit of an account. Returns whether it had one.
    pub fn set_account(&mut self, account: &AccountName, max_cps: Option<u32>, by: &str) -> bool {
        let known = self.outbound.accounts.get(account).copied();
        if known != max_cps {
            let (account, by, last_dial) = (account.clone(), by.to_owned(), 0);
            self.record(Change::Account { account, max_cps, last_dial, by });
        }
        known.is_some()
    }
}
