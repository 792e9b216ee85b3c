//! How much a merchant may have, checked in the step in which a pod is given.

use super::{Allocate, Fleet};
use crate::rules::RATE_WINDOW;
use crate::{
    Millis,
    merchant::{Limit, Limits, MerchantConfig},
    names::MerchantId,
};

impl Fleet {
    pub(super) fn config_of(&self, merchant: Option<&MerchantId>) -> Option<&MerchantConfig> {
        self.merchants.get(merchant?)?.config.as_ref().ok()
    }

    fn limits_of<'a>(&self, request: &'a Allocate) -> Option<(&'a MerchantId, Limits)> {
        let config = self.config_of(request.merchant.as_ref())?;
        Some((request.merchant.as_ref()?, config.limits))
    }

    /// The limit that a new call would exceed, if any.
    pub(super) fn exceeded(&self, request: &Allocate, now: Millis) -> Option<Limit> {
        let (id, limits) = self.limits_of(request)?;
        let live = self.merchant_calls.get(id).copied().unwrap_or(0);
        if limits.max_calls.is_some_and(|most| live >= most as usize) {
            return Some(Limit::MaxCalls);
        }
        let most = limits.max_rate?;
        let recent = self.admissions.get(id);
        let nth = most.checked_sub(1).map(|nth| recent.and_then(|it| it.get(nth as usize)));
        match nth {
            None => Some(Limit::MaxRate),
            // A call of the future was counted before the clock was set back.
            Some(at) => at
                .is_some_and(|at| (*at..*at + RATE_WINDOW).contains(&now))
                .then_some(Limit::MaxRate),
        }
    }

    /// Remembers when a merchant with a rate had its last calls, the newest first.
    pub(super) fn admitted(&mut self, request: &Allocate, now: Millis) {
        let Some((id, Limits { max_rate: Some(most), .. })) = self.limits_of(request) else {
            return;
        };
        let id = id.clone();
        let recent = self.admissions.entry(id).or_default();
        recent.push_front(now);
        recent.truncate(most as usize);
    }
}
