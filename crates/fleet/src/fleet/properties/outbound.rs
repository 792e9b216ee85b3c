//! Operations of diallers, checked against the reservations that they were granted.

use std::collections::BTreeMap;

use super::{
    super::*,
    oracle::{Oracle, free_slots},
};
use crate::{
    names::{AccountName, ReservationId},
    outbound::{DialSums, held},
    testing::operations::OutboundOperation,
};

/// A reservation as its dialler knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Grant {
    merchant: MerchantId,
    pub(super) until: Millis,
    call: Option<CallSid>,
}

/// The reservations that are outstanding, and the times of grants.
#[derive(Default)]
pub(super) struct OutboundOracle {
    grants: BTreeMap<ReservationId, Grant>,
    /// The reservation for which each call was reported last.
    tied: BTreeMap<CallSid, ReservationId>,
    /// Grants of each account with a limit, in order.
    dials: BTreeMap<AccountName, Vec<Millis>>,
}

impl OutboundOracle {
    /// A reservation ended.
    pub(super) fn end(&mut self, id: &ReservationId) -> Grant {
        self.tied.retain(|_, tied| tied != id);
        self.grants.remove(id).expect("the reservation was outstanding")
    }

    /// The provider reported the end of a dial.
    pub(super) fn end_dial(&mut self, call: &CallSid) {
        let id = self.tied.get(call).expect("a dial of this call").clone();
        self.end(&id);
    }

    /// A reservation is used once, by a new call of its merchant, before it expires.
    pub(super) fn check_use(
        &mut self,
        request: &Allocate,
        effect: Option<&ReservationUse>,
        now: Millis,
    ) {
        let Some(effect) = effect else { return };
        let id = request.reservation.as_ref().expect("an effect of a reservation");
        let grant = self.grants.get(id).filter(|grant| grant.until > now);
        let is_other = |grant: &Grant| {
            request.merchant.as_ref().is_some_and(|merchant| *merchant != grant.merchant)
        };
        match effect {
            ReservationUse::Unknown => assert_eq!(grant, None, "{id} is outstanding"),
            ReservationUse::OtherMerchant => assert!(grant.is_some_and(is_other), "{id}"),
            ReservationUse::Used { merchant } => {
                assert!(grant.is_some_and(|it| !is_other(it) && it.merchant == *merchant), "{id}");
                self.end(id);
            }
            ReservationUse::Repeated { merchant } => {
                assert_eq!(grant, None, "{id} is outstanding");
                let named = request.merchant.as_ref();
                assert!(named.is_none_or(|named| named == merchant), "{id}");
            }
        }
    }

    pub(super) fn shift(&mut self, by: i64) {
        let grants = self.grants.values_mut().map(|grant| &mut grant.until);
        let times = grants.chain(self.dials.values_mut().flatten());
        times.for_each(|time| *time = time.saturating_add_signed(by));
    }

    pub(super) fn check_state(&self, fleet: &Fleet) {
        let known: BTreeMap<ReservationId, Grant> = fleet
            .outbound
            .iter()
            .map(|(id, facts)| {
                let Reservation { merchant, until, call, .. } = facts.clone();
                (id.clone(), Grant { merchant, until, call })
            })
            .collect();
        assert_eq!(known, self.grants, "the reservations differ from those that diallers know");
    }

    /// I17: no second has more grants of an account than its limit.
    fn check_rate(&mut self, account: &AccountName, max_cps: u32, grants: usize, now: Millis) {
        let dials = self.dials.entry(account.clone()).or_default();
        dials.extend(std::iter::repeat_n(now, grants));
        let recent = dials.iter().filter(|at| **at + 1_000 > now).count();
        assert!(grants == 0 || recent <= max_cps as usize, "I17: {recent} dials of {account}");
    }
}

/// The slots held in a pool, derived from the reservations.
pub(super) fn held_in(fleet: &Fleet, pool: &Pool) -> usize {
    let mut sums = DialSums::default();
    let dials = fleet.outbound.iter().filter(|(_, facts)| facts.pool == *pool);
    dials.for_each(|(_, facts)| sums.add(facts.probability));
    let target = fleet.outbound.miss_target();
    held(sums, f64::from(target) / 1_000_000.0) as usize
}

pub(super) fn step(
    fleet: &mut Fleet,
    oracle: &mut Oracle,
    now: Millis,
    operation: &OutboundOperation,
) {
    match operation {
        OutboundOperation::Reserve(request) => reserve(fleet, oracle, now, request),
        OutboundOperation::Dialed { id, call } => {
            let ttl = 6_000;
            let OutboundOracle { grants, tied, .. } = &mut oracle.outbound;
            let is_outstanding = |id: &_| grants.get(id).is_some_and(|grant| grant.until > now);
            let is_taken = tied.get(call).is_some_and(|known| known != id && is_outstanding(known));
            let is_tied = grants.get(id).is_some_and(|grant| grant.call.as_ref() == Some(call));
            let is_over = oracle.calls.contains_key(call) || oracle.waiting.contains_key(call);
            let is_accepted = is_outstanding(id) && (is_tied || !is_taken && !is_over);
            let outcome = fleet.dialed(id, call, ttl, now);
            assert_eq!(outcome.is_ok(), is_accepted, "{id}: {outcome:?}");
            let grant = grants.get_mut(id).filter(|_| is_accepted);
            if let Some(grant) = grant.filter(|grant| grant.call.as_ref() != Some(call)) {
                (grant.until, grant.call) = (now + ttl, Some(call.clone()));
                tied.retain(|_, known| known != id);
                tied.insert(call.clone(), id.clone());
            }
        }
        OutboundOperation::GiveBack { id } => {
            let is_known = oracle.outbound.grants.get(id).is_some_and(|grant| grant.until > now);
            assert_eq!(fleet.give_back(id, now).is_ok(), is_known, "{id}");
            if is_known {
                oracle.outbound.end(id);
            }
        }
        OutboundOperation::Number { number, max_lines } => {
            fleet.set_number(number, *max_lines, "");
        }
        OutboundOperation::Account { account, max_cps } => {
            fleet.set_account(account, *max_cps, "");
            // The times before another limit say nothing about the new one.
            oracle.outbound.dials.remove(account);
        }
        OutboundOperation::Waiting { router, waiting } => {
            fleet.report_waiting_dials(router, waiting, now);
        }
    }
}

fn reserve(fleet: &mut Fleet, oracle: &mut Oracle, now: Millis, request: &Reserve) {
    let is_repeat = request.ids.iter().any(|id| oracle.outbound.grants.contains_key(id));
    let before = fleet.outbound.len();
    let reserved = fleet.reserve(request, now);
    if is_repeat {
        return assert_eq!(fleet.outbound.len(), before, "a repeat granted more");
    }
    let count = reserved.granted.len();
    assert_eq!(reserved.granted, request.ids[..count], "other ids");
    assert_eq!(reserved.limit.is_some(), count < request.ids.len(), "a refusal has a reason");
    assert_eq!(reserved.retry_after > 0, reserved.limit.is_some(), "a refusal has a time");
    for id in &reserved.granted {
        let (merchant, until) = (request.merchant.clone(), reserved.until);
        oracle.outbound.grants.insert(id.clone(), Grant { merchant, until, call: None });
    }
    let accounts = fleet.accounts();
    let limit = |account: &AccountName| accounts.iter().find(|it| it.account == *account);
    if let Some(status) = request.accounts.iter().find_map(limit) {
        oracle.outbound.check_rate(&status.account, status.max_cps, count, now);
    }
    if count == 0 {
        return;
    }
    // I18: the grants fit the limits at this moment.
    let number = request.number.as_ref();
    let limited = fleet.numbers().into_iter().find(|it| Some(&it.number) == number);
    assert!(limited.is_none_or(|it| it.lines <= it.max_lines as usize), "I18: lines");
    let max_calls =
        fleet.merchant_config_of(Some(&request.merchant)).and_then(|it| it.limits.max_calls);
    let live = fleet.merchant_calls.get(&request.merchant).copied().unwrap_or(0);
    assert!(max_calls.is_none_or(|max| live <= max as usize), "I18: max_calls");
    for id in &reserved.granted {
        let pool = fleet.reservation(id).expect("a granted reservation").facts.pool;
        let (free, held) = (free_slots(fleet, &pool), held_in(fleet, &pool));
        let in_service = fleet.pools[&pool].in_service() as u64;
        let cap = u64::from(fleet.tiers.kind(&pool).expect("the pool exists").cap());
        let reserve = fleet.tiers.bounds(&pool).inbound_reserve.of_slots(in_service * cap);
        assert!(held + reserve as usize <= free, "I18: {held} + {reserve} of {free} in {pool}");
        assert_eq!(fleet.queue.len_of(&pool), 0, "a dial overtook a waiting call");
    }
}
