//! Read models of outbound calls.

#[cfg(any(test, feature = "testing"))]
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use super::{Allocate, Fleet, HeldDials, Reservation, calls::Continuation};
#[cfg(any(test, feature = "testing"))]
use crate::names::CallSid;
use crate::{
    Millis,
    names::{AccountName, MerchantId, PhoneNumber, Pool, ReservationId},
};

/// An outstanding reservation with its id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReservationStatus {
    pub id: ReservationId,
    pub facts: Reservation,
}

/// A query for reservations, by deadline.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReservationQuery {
    pub merchant: Option<MerchantId>,
    /// The page begins after this deadline and id.
    pub after: Option<(Millis, ReservationId)>,
    pub limit: usize,
}

/// A page of reservations, and the cursor of the next page if there may be more.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReservationPage {
    pub reservations: Vec<ReservationStatus>,
    pub next: Option<(Millis, ReservationId)>,
}

/// A number with a limit of lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumberStatus {
    pub number: PhoneNumber,
    pub max_lines: u32,
    /// Lines in use by calls and reservations.
    pub lines: usize,
}

/// An account with a rate limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccountStatus {
    pub account: AccountName,
    pub max_cps: u32,
    /// The last grant; 0 if there was none.
    pub last_dial: Millis,
}

/// Outstanding dials of all pools.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OutboundStatus {
    pub reservations: usize,
    /// By name.
    pub pools: Vec<(Pool, HeldDials)>,
}

impl Fleet {
    /// An outstanding reservation.
    pub fn reservation(&self, id: &ReservationId) -> Option<ReservationStatus> {
        let facts = self.outbound.get(id)?.clone();
        Some(ReservationStatus { id: id.clone(), facts })
    }

    /// A page of the reservations that have not expired, by deadline.
    pub fn reservations(&self, query: &ReservationQuery, now: Millis) -> ReservationPage {
        let after = query.after.clone().map_or(Bound::Unbounded, Bound::Excluded);
        let mut page = ReservationPage::default();
        for (until, id) in self.outbound.deadlines().range((after, Bound::Unbounded)) {
            let Some(found) = self.reservation(id) else { continue };
            let merchant = query.merchant.as_ref();
            if *until <= now || merchant.is_some_and(|it| *it != found.facts.merchant) {
                continue;
            }
            if page.reservations.len() == query.limit {
                return page;
            }
            page.reservations.push(found);
            page.next = Some((*until, id.clone()));
        }
        page.next = None;
        page
    }

    /// Numbers with a limit of lines, by name.
    pub fn numbers(&self) -> Vec<NumberStatus> {
        self.outbound.numbers.keys().filter_map(|number| self.number(number)).collect()
    }

    /// A number with a limit of lines.
    pub fn number(&self, number: &PhoneNumber) -> Option<NumberStatus> {
        let max_lines = *self.outbound.numbers.get(number)?;
        Some(NumberStatus { number: number.clone(), max_lines, lines: self.outbound.lines(number) })
    }

    /// Accounts with a rate limit, by name.
    pub fn accounts(&self) -> Vec<AccountStatus> {
        let accounts = self.outbound.accounts.iter();
        accounts
            .map(|(account, max_cps)| AccountStatus {
                account: account.clone(),
                max_cps: *max_cps,
                last_dial: self.outbound.last_dial(account),
            })
            .collect()
    }

    pub fn outbound_status(&self) -> OutboundStatus {
        let pools = self.outbound.pools().map(|(pool, dials)| (pool.clone(), *dials));
        let mut pools: Vec<(Pool, HeldDials)> = pools.collect();
        pools.sort_by(|a, b| a.0.cmp(&b.0));
        OutboundStatus { reservations: self.outbound.len(), pools }
    }

    /// The learned probability that a merchant's dial is answered, in units of 1/1024.
    pub fn answer_probability(&self, merchant: &MerchantId, now: Millis) -> u64 {
        self.outbound.answer_rate(merchant, now).probability()
    }

    /// The number whose line a call uses.
    pub(super) fn number_of(
        &self,
        request: &Allocate,
        continuation: &Continuation,
    ) -> Option<PhoneNumber> {
        if continuation.is_known || continuation.is_dialed {
            return continuation.number.clone();
        }
        let numbers = &self.outbound.numbers;
        request.numbers.iter().find(|number| numbers.contains_key(*number)).cloned()
    }

    /// The numbers of live and waiting calls that use a line.
    #[cfg(any(test, feature = "testing"))]
    pub fn call_numbers(&self) -> Vec<(CallSid, PhoneNumber)> {
        let live = self.calls.iter().map(|(call, facts)| (call, &facts.number));
        let waiting = self.queue.iter().map(|(call, entry)| (call, &entry.number));
        let all = live.chain(waiting);
        all.filter_map(|(call, number)| Some((call.clone(), number.clone()?))).collect()
    }

    /// The calls and reservations that use a line of each number.
    #[cfg(any(test, feature = "testing"))]
    pub fn line_holders(&self) -> BTreeMap<String, BTreeSet<String>> {
        let lines = self.outbound.all_lines().iter();
        lines.map(|(number, holders)| (number.to_string(), holders.clone())).collect()
    }
}
