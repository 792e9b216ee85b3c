//! The facts about outbound calls: reservations, numbers, accounts and learned answer rates, with
//! the sums and indexes derived from them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{Change, Reservation, ReservationEnd, clock_shift::shift_deadlines};
use crate::{
    Millis,
    names::{AccountName, CallSid, MerchantId, PhoneNumber, Pool, ReservationId},
    outbound::{AnswerRate, DialSums, held},
    rules::{ANSWER_RATE_TTL, MISS_TARGET_UNIT, PROBABILITY_UNIT},
};

/// Learned answer rates beyond which expired ones are dropped.
const MAX_ANSWER_RATES: usize = 10_000;

/// The outstanding dials of a pool, and the slots that are held for them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HeldDials {
    pub sums: DialSums,
    pub held: u64,
}

impl HeldDials {
    /// The mean answer probability of the dials.
    pub fn answer_rate(&self) -> f64 {
        let dials = self.sums.dials.max(1) * PROBABILITY_UNIT;
        self.sums.probability as f64 / dials as f64
    }
}

#[derive(Debug, Default)]
pub(super) struct OutboundFacts {
    reservations: HashMap<ReservationId, Reservation>,
    deadlines: BTreeSet<(Millis, ReservationId)>,
    dials: HashMap<CallSid, ReservationId>,
    pools: HashMap<Pool, HeldDials>,
    /// Millionths.
    miss_target: u32,
    answer_rates: HashMap<MerchantId, (AnswerRate, Millis)>,
    pub(super) numbers: BTreeMap<PhoneNumber, u32>,
    /// The calls and reservations that use a line of each number; see [`call_line`].
    lines: HashMap<PhoneNumber, BTreeSet<String>>,
    /// Calls per second of the accounts with a limit.
    pub(super) accounts: BTreeMap<AccountName, u32>,
    /// The last grant of each account that has or had a limit.
    last_dials: BTreeMap<AccountName, Millis>,
    /// The reservations of answers that were refused for lack of a pod, until their deadlines. Not
    /// journaled: the callers are gone after a restart.
    missed_answers: HashMap<CallSid, (ReservationId, Reservation)>,
}

/// The entry of a call among the lines of its number. A reservation is listed by its id.
pub(super) fn call_line(call: &CallSid) -> String {
    format!("call:{call}")
}

impl OutboundFacts {
    pub(super) fn get(&self, id: &ReservationId) -> Option<&Reservation> {
        self.reservations.get(id)
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (&ReservationId, &Reservation)> {
        self.reservations.iter()
    }

    pub(super) fn len(&self) -> usize {
        self.reservations.len()
    }

    /// Reservations by deadline.
    pub(super) fn deadlines(&self) -> &BTreeSet<(Millis, ReservationId)> {
        &self.deadlines
    }

    pub(super) fn dial_of(&self, call: &CallSid) -> Option<&ReservationId> {
        self.dials.get(call)
    }

    pub(super) fn overdue(&self, now: Millis) -> Option<&ReservationId> {
        self.deadlines.first().filter(|(until, _)| *until <= now).map(|(_, id)| id)
    }

    pub(super) fn dials_in(&self, pool: &Pool) -> HeldDials {
        self.pools.get(pool).copied().unwrap_or_default()
    }

    pub(super) fn pools(&self) -> impl Iterator<Item = (&Pool, &HeldDials)> {
        self.pools.iter()
    }

    pub(super) fn answer_rate(&self, merchant: &MerchantId, now: Millis) -> AnswerRate {
        let known = self.answer_rates.get(merchant);
        let known = known.filter(|(_, at)| *at + ANSWER_RATE_TTL >= now);
        known.map(|(rate, _)| *rate).unwrap_or_default()
    }

    pub(super) fn lines(&self, number: &PhoneNumber) -> usize {
        self.lines.get(number).map_or(0, BTreeSet::len)
    }

    #[cfg(test)]
    pub(super) fn miss_target(&self) -> u32 {
        self.miss_target
    }

    #[cfg(any(test, feature = "testing"))]
    pub(super) fn all_lines(&self) -> &HashMap<PhoneNumber, BTreeSet<String>> {
        &self.lines
    }

    pub(super) fn take_line(&mut self, number: Option<&PhoneNumber>, holder: String) {
        if let Some(number) = number {
            self.lines.entry(number.clone()).or_default().insert(holder);
        }
    }

    pub(super) fn free_line(&mut self, number: Option<&PhoneNumber>, holder: &str) {
        let Some(number) = number else { return };
        let Some(holders) = self.lines.get_mut(number) else { return };
        holders.remove(holder);
        if holders.is_empty() {
            self.lines.remove(number);
        }
    }

    pub(super) fn insert(&mut self, id: ReservationId, facts: Reservation, miss_target: u32) {
        if miss_target != self.miss_target {
            self.miss_target = miss_target;
            self.pools
                .values_mut()
                .for_each(|dials| dials.held = held_slots(dials.sums, miss_target));
        }
        let dials = self.pools.entry(facts.pool.clone()).or_default();
        dials.sums.add(facts.probability);
        dials.held = held_slots(dials.sums, miss_target);
        self.take_line(facts.number.as_ref(), id.to_string());
        self.deadlines.insert((facts.until, id.clone()));
        if let Some(call) = &facts.call {
            self.dials.insert(call.clone(), id.clone());
        }
        if let Some(account) = &facts.account {
            self.record_dial(account, facts.at);
        }
        self.reservations.insert(id, facts);
    }

    pub(super) fn set_dialed(&mut self, id: &ReservationId, call: CallSid, until: Millis) {
        let Some(facts) = self.reservations.get_mut(id) else { return };
        self.deadlines.remove(&(facts.until, id.clone()));
        self.deadlines.insert((until, id.clone()));
        facts.until = until;
        let before = facts.call.replace(call.clone());
        self.forget_dial(before, id);
        self.dials.insert(call, id.clone());
    }

    /// Removes the entry of a dial, unless the call was reported for another reservation since.
    fn forget_dial(&mut self, call: Option<CallSid>, id: &ReservationId) {
        if let Some(call) = call.filter(|call| self.dials.get(call) == Some(id)) {
            self.dials.remove(&call);
        }
    }

    /// Removes a reservation, and learns from its end.
    pub(super) fn remove(
        &mut self,
        id: &ReservationId,
        cause: ReservationEnd,
        at: Millis,
    ) -> Option<Reservation> {
        let facts = self.reservations.remove(id)?;
        self.deadlines.remove(&(facts.until, id.clone()));
        self.free_line(facts.number.as_ref(), id.as_str());
        self.forget_dial(facts.call.clone(), id);
        if let Some(dials) = self.pools.get_mut(&facts.pool) {
            dials.sums.remove(facts.probability);
            dials.held = held_slots(dials.sums, self.miss_target);
            if dials.sums.dials == 0 {
                self.pools.remove(&facts.pool);
            }
        }
        // A reservation that was not reported as dialed says nothing about the called person.
        let is_answered = cause == ReservationEnd::Answered;
        if is_answered || facts.call.is_some() {
            let mut rate = self.answer_rate(&facts.merchant, at);
            rate.record(is_answered, self.dials_in(&facts.pool).sums.dials);
            self.set_answer_rate(facts.merchant.clone(), rate, at);
        }
        Some(facts)
    }

    /// The reservation of an answer that was refused for lack of a pod.
    pub(super) fn missed_answer(
        &self,
        call: &CallSid,
        id: &ReservationId,
        now: Millis,
    ) -> Option<&Reservation> {
        let (known, facts) = self.missed_answers.get(call)?;
        Some(facts).filter(|facts| known == id && facts.until > now)
    }

    pub(super) fn set_missed_answer(
        &mut self,
        call: CallSid,
        id: ReservationId,
        facts: Reservation,
    ) {
        self.missed_answers.insert(call, (id, facts));
    }

    pub(super) fn forget_missed_answer(&mut self, call: &CallSid) {
        self.missed_answers.remove(call);
    }

    pub(super) fn forget_expired_answers(&mut self, now: Millis) {
        self.missed_answers.retain(|_, (_, facts)| facts.until > now);
    }

    pub(super) fn set_answer_rate(&mut self, merchant: MerchantId, rate: AnswerRate, at: Millis) {
        if self.answer_rates.len() >= MAX_ANSWER_RATES {
            self.answer_rates.retain(|_, (_, saved)| *saved + ANSWER_RATE_TTL >= at);
        }
        self.answer_rates.insert(merchant, (rate, at));
    }

    /// The last grant of an account; 0 if there was none.
    pub(super) fn last_dial(&self, account: &AccountName) -> Millis {
        self.last_dials.get(account).copied().unwrap_or(0)
    }

    fn record_dial(&mut self, account: &AccountName, at: Millis) {
        let last = self.last_dials.entry(account.clone()).or_default();
        *last = at.max(*last);
    }

    pub(super) fn set_number(&mut self, number: PhoneNumber, max_lines: Option<u32>) {
        match max_lines {
            None => self.numbers.remove(&number),
            Some(max_lines) => self.numbers.insert(number, max_lines),
        };
    }

    pub(super) fn set_account(&mut self, account: AccountName, max_cps: Option<u32>, last: Millis) {
        if last > 0 {
            self.record_dial(&account, last);
        }
        match max_cps {
            None => self.accounts.remove(&account),
            Some(max_cps) => self.accounts.insert(account, max_cps),
        };
    }

    pub(super) fn shift(&mut self, by: i64) {
        let shift = |time: &mut Millis| *time = time.saturating_add_signed(by);
        for facts in self.reservations.values_mut() {
            shift(&mut facts.at);
            shift(&mut facts.until);
        }
        self.missed_answers.values_mut().for_each(|(_, facts)| shift(&mut facts.until));
        shift_deadlines(&mut self.deadlines, by);
        self.answer_rates.values_mut().for_each(|(_, at)| shift(at));
        self.last_dials.values_mut().for_each(shift);
    }

    /// The changes that rebuild these facts. Accounts precede reservations, numbers need no order.
    pub(super) fn facts(&self) -> impl Iterator<Item = Change> {
        let numbers = self.numbers.iter().map(|(number, max_lines)| Change::Number {
            number: number.clone(),
            max_lines: Some(*max_lines),
            by: String::new(),
        });
        let accounts: BTreeSet<&AccountName> =
            self.accounts.keys().chain(self.last_dials.keys()).collect();
        let accounts = accounts.into_iter().map(|account| Change::Account {
            account: account.clone(),
            max_cps: self.accounts.get(account).copied(),
            last_dial: self.last_dial(account),
            by: String::new(),
        });
        let rates = self.answer_rates.iter().map(|(merchant, (rate, at))| Change::AnswerRate {
            merchant: merchant.clone(),
            dials: rate.dials,
            answers: rate.answers,
            at: *at,
        });
        let reservations = self.reservations.iter().map(|(id, facts)| Change::Reserved {
            reservation: id.clone(),
            facts: facts.clone(),
            miss_target: self.miss_target,
        });
        numbers.chain(accounts).chain(rates).chain(reservations)
    }
}

/// The slots held for dials; the miss target is in millionths.
pub(super) fn held_slots(sums: DialSums, miss_target: u32) -> u64 {
    held(sums, f64::from(miss_target) / f64::from(MISS_TARGET_UNIT))
}
