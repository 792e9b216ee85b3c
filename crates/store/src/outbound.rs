//! Outbound calls in the store: reservations, lines of numbers, rates of accounts.

use std::collections::BTreeMap;

use crate::Reply;
use fleet::{
    AccountStatus, DialDemand, DialRefused, Millis, NumberStatus, OutboundStatus,
    ReservationNotFound, ReservationPage, ReservationQuery, ReservationStatus, Reserve, Reserved,
    WaitingDials,
    names::{AccountName, CallSid, MerchantId, PhoneNumber, Pool, ReservationId},
};

/// Outstanding dials, and the limits of accounts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Outbound {
    pub status: OutboundStatus,
    /// By name.
    pub accounts: Vec<AccountStatus>,
}

/// The operations of diallers, part of [`crate::Store`].
pub trait OutboundStore {
    /// Grants as many reservations as the limits allow now.
    fn reserve<'a>(&'a self, request: &'a Reserve) -> Reply<'a, Reserved>;
    /// Ties a reservation to the provider's call. Returns its new deadline; a repeat returns the
    /// same one.
    fn dialed<'a>(
        &'a self,
        id: &'a ReservationId,
        call: &'a CallSid,
        ttl: Millis,
    ) -> Reply<'a, Result<Millis, DialRefused>>;
    fn give_back<'a>(&'a self, id: &'a ReservationId)
    -> Reply<'a, Result<(), ReservationNotFound>>;
    fn reservation<'a>(&'a self, id: &'a ReservationId) -> Reply<'a, Option<ReservationStatus>>;
    /// One page of reservations, in the order of their deadline.
    fn reservations<'a>(&'a self, query: &'a ReservationQuery) -> Reply<'a, ReservationPage>;
    /// The learned probability that a merchant's dial is answered, in units of 1/1024.
    fn answer_probability<'a>(&'a self, merchant: &'a MerchantId) -> Reply<'a, u64>;
    fn outbound(&self) -> Reply<'_, Outbound>;
    /// Numbers with a limit of lines, by name.
    fn numbers(&self) -> Reply<'_, Vec<NumberStatus>>;
    /// A number with a limit of lines.
    fn number<'a>(&'a self, number: &'a PhoneNumber) -> Reply<'a, Option<NumberStatus>>;
    /// Reports the dials that wait for a pod at a router. A report counts for
    /// [`fleet::rules::WAITING_DIALS_TTL`].
    fn report_waiting_dials<'a>(
        &'a self,
        router: &'a str,
        waiting: &'a [WaitingDials],
    ) -> Reply<'a, ()>;
    /// The demand of dials by pool, of all routers.
    fn dial_demand(&self) -> Reply<'_, BTreeMap<Pool, DialDemand>>;
    /// Sets or deletes the limit of lines of a number. Returns whether it had one.
    fn set_number<'a>(
        &'a self,
        number: &'a PhoneNumber,
        max_lines: Option<u32>,
        by: &'a str,
    ) -> Reply<'a, bool>;
    /// Sets or deletes the rate limit of an account. Returns whether it had one.
    fn set_account<'a>(
        &'a self,
        account: &'a AccountName,
        max_cps: Option<u32>,
        by: &'a str,
    ) -> Reply<'a, bool>;
}
