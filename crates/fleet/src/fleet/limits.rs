//! Merchant limits, checked in the same operation as the allocation.

use super::{Allocate, Fleet};
use crate::rules::RATE_WINDOW;
use crate::{
    Millis,
    merchant::{Limit, Limits, MerchantConfig},
    names::MerchantId,
};

impl Fleet {
    pub(super) fn merchant_config_of(
        &self,
        merchant: Option<&MerchantId>,
    ) -> Option<&MerchantConfig> {
        self.merchants.get(merchant?)?.config.as_ref().ok()
    }

    fn limits_of<'a>(&self, request: &'a Allocate) -> Option<(&'a MerchantId, Limits)> {
        let config = self.merchant_config_of(request.merchant.as_ref())?;
        Some((request.merchant.as_ref()?, config.limits))
    }

    /// The limit that a new call of the merchant would exceed, if any.
    pub(super) fn exceeded_limit(&self, request: &Allocate, now: Millis) -> Option<Limit> {
        let (id, limits) = self.limits_of(request)?;
        let live = self.merchant_calls.get(id).copied().unwrap_or(0);
        if limits.max_calls.is_some_and(|max| live >= max as usize) {
            return Some(Limit::MaxCalls);
        }
        let max_rate = limits.max_rate?;
        let recent = self.admissions.get(id);
        let nth = max_rate.checked_sub(1).map(|nth| recent.and_then(|it| it.get(nth as usize)));
        match nth {
            None => Some(Limit::MaxRate),
            // An admission later than now precedes a clock step backwards: it does not count.
            Some(at) => at
                .is_some_and(|at| (*at..*at + RATE_WINDOW).contains(&now))
                .then_some(Limit::MaxRate),
        }
    }

    /// Records the admission of a call, newest first, if its merchant has `max_rate`.
    pub(super) fn count_admission(&mut self, request: &Allocate, now: Millis) {
        let Some((id, Limits { max_rate: Some(max_rate), .. })) = self.limits_of(request) else {
            return;
        };
        let id = id.clone();
        let recent = self.admissions.entry(id).or_default();
        recent.push_front(now);
        recent.truncate(max_rate as usize);
    }
}
