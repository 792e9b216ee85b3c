//! Dials that wait for a pod: the routers report them, and the capacity policy counts them as
//! demand.

use std::collections::BTreeMap;

use super::Fleet;
use crate::{
    Millis, merchant,
    names::{MerchantId, PhoneNumber, Pool},
    rules::PROBABILITY_UNIT,
    rules::{MAX_WAITING_DIALS, WAITING_DIALS_TTL},
};

/// Dials of a merchant that wait for a pod at a router.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingDials {
    pub merchant: MerchantId,
    /// The number that they are made from.
    pub number: Option<PhoneNumber>,
    pub dials: u64,
}

/// The demand of a pool for dials.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DialDemand {
    /// Slots that are held for outstanding dials.
    pub held: u64,
    /// Dials that wait for a pod.
    pub waiting: u64,
    /// The sum of their answer probabilities, in units of 1/1024.
    pub probability: u64,
}

impl DialDemand {
    /// The slots that the dials need: a waiting dial needs its answer probability of a slot.
    pub fn slots(self) -> u64 {
        self.held + self.probability.div_ceil(PROBABILITY_UNIT)
    }
}

/// The last report of each router. Not journaled: an embedded store has one router, which repeats
/// its report.
#[derive(Debug, Default)]
pub(super) struct WaitingReports(BTreeMap<String, (Millis, Vec<WaitingDials>)>);

impl WaitingReports {
    pub(super) fn shift(&mut self, by: i64) {
        self.0.values_mut().for_each(|(until, _)| *until = until.saturating_add_signed(by));
    }
}

impl Fleet {
    /// Records the dials that wait at a router, until [`WAITING_DIALS_TTL`] from now.
    pub fn report_waiting_dials(&mut self, router: &str, waiting: &[WaitingDials], now: Millis) {
        let reports = &mut self.waiting_reports.0;
        reports.retain(|_, (until, _)| now < *until);
        if waiting.is_empty() {
            reports.remove(router);
        } else {
            reports.insert(router.to_owned(), (now + WAITING_DIALS_TTL, waiting.to_vec()));
        }
    }

    /// The demand of dials by pool: outstanding ones in the pool that holds their slots, waiting
    /// ones in the first pool of their merchant's chain. Dials that the merchant's `max_calls` or
    /// the lines of their number refuse need no pod.
    pub fn dial_demand(&self, now: Millis) -> BTreeMap<Pool, DialDemand> {
        let mut demand: BTreeMap<Pool, DialDemand> = BTreeMap::new();
        for (pool, dials) in self.outbound.pools() {
            demand.entry(pool.clone()).or_default().held = dials.held;
        }
        for (merchant, numbers) in self.waiting_by_merchant(now) {
            let Some(pool) = self.first_pool(merchant) else { continue };
            let within_lines = |(number, dials): (Option<&PhoneNumber>, u64)| {
                dials.min(self.lines_room(number) as u64)
            };
            let dials: u64 = numbers.into_iter().map(within_lines).sum();
            let waiting = dials.min(self.max_calls_room(merchant) as u64);
            let known = demand.entry(pool).or_default();
            known.waiting += waiting;
            known.probability += waiting * self.answer_probability(merchant, now);
        }
        demand
    }

    /// The waiting dials of all routers, by merchant and number.
    fn waiting_by_merchant(
        &self,
        now: Millis,
    ) -> BTreeMap<&MerchantId, BTreeMap<Option<&PhoneNumber>, u64>> {
        let mut merchants: BTreeMap<_, BTreeMap<_, u64>> = BTreeMap::new();
        let reports = self.waiting_reports.0.values().filter(|(until, _)| now < *until);
        for WaitingDials { merchant, number, dials } in reports.flat_map(|(_, waiting)| waiting) {
            let numbers = merchants.entry(merchant).or_default();
            *numbers.entry(number.as_ref()).or_default() += (*dials).min(MAX_WAITING_DIALS);
        }
        merchants
    }

    /// The first pool of a merchant's chain that is in the tier table or has pods.
    fn first_pool(&self, merchant: &MerchantId) -> Option<Pool> {
        let config = self.merchant_config_of(Some(merchant));
        let is_known = |pool: &Pool| {
            let has_pods = || self.pools.get(pool).is_some_and(|index| index.assigned > 0);
            self.tiers.kind(pool).is_some() && (self.tiers.defines(pool) || has_pods())
        };
        let pools =
            merchant::chain(&self.tiers, config).filter_map(|step| self.tiers.resolve(step));
        pools.into_iter().find(is_known)
    }
}
