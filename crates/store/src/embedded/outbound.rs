//! Outbound calls in the embedded store.

use std::collections::BTreeMap;

use crate::{Embedded, Outbound, OutboundStore, Reply};
use fleet::{
    DialDemand, DialRefused, Millis, NumberStatus, ReservationNotFound, ReservationPage,
    ReservationQuery, ReservationStatus, Reserve, Reserved, WaitingDials,
    names::{AccountName, CallSid, MerchantId, PhoneNumber, Pool, ReservationId},
};

impl OutboundStore for Embedded {
    fn reserve<'a>(&'a self, request: &'a Reserve) -> Reply<'a, Reserved> {
        self.step("reserve", |fleet, now| fleet.reserve(request, now))
    }

    fn dialed<'a>(
        &'a self,
        id: &'a ReservationId,
        call: &'a CallSid,
        ttl: Millis,
    ) -> Reply<'a, Result<Millis, DialRefused>> {
        self.step("dialed", move |fleet, now| fleet.dialed(id, call, ttl, now))
    }

    fn give_back<'a>(
        &'a self,
        id: &'a ReservationId,
    ) -> Reply<'a, Result<(), ReservationNotFound>> {
        self.step("give_back", |fleet, now| fleet.give_back(id, now))
    }

    fn reservation<'a>(&'a self, id: &'a ReservationId) -> Reply<'a, Option<ReservationStatus>> {
        self.step("reservation", |fleet, now| {
            fleet.reservation(id).filter(|found| found.facts.until > now)
        })
    }

    fn reservations<'a>(&'a self, query: &'a ReservationQuery) -> Reply<'a, ReservationPage> {
        self.step("reservations", |fleet, now| fleet.reservations(query, now))
    }

    fn answer_probability<'a>(&'a self, merchant: &'a MerchantId) -> Reply<'a, u64> {
        self.step("answer_rate", |fleet, now| fleet.answer_probability(merchant, now))
    }

    fn outbound(&self) -> Reply<'_, Outbound> {
        self.step("outbound_status", |fleet, _| Outbound {
            status: fleet.outbound_status(),
            accounts: fleet.accounts(),
        })
    }

    fn numbers(&self) -> Reply<'_, Vec<NumberStatus>> {
        self.step("numbers", |fleet, _| fleet.numbers())
    }

    fn number<'a>(&'a self, number: &'a PhoneNumber) -> Reply<'a, Option<NumberStatus>> {
        self.step("number", |fleet, _| fleet.number(number))
    }

    fn report_waiting_dials<'a>(
        &'a self,
        router: &'a str,
        waiting: &'a [WaitingDials],
    ) -> Reply<'a, ()> {
        self.step("report_waiting_dials", move |fleet, now| {
            fleet.report_waiting_dials(router, waiting, now)
        })
    }

    fn dial_demand(&self) -> Reply<'_, BTreeMap<Pool, DialDemand>> {
        self.step("dial_demand", |fleet, now| fleet.dial_demand(now))
    }

    fn set_number<'a>(
        &'a self,
        number: &'a PhoneNumber,
        max_lines: Option<u32>,
        by: &'a str,
    ) -> Reply<'a, bool> {
        self.step("set_dial_limit", move |fleet, _| fleet.set_number(number, max_lines, by))
    }

    fn set_account<'a>(
        &'a self,
        account: &'a AccountName,
        max_cps: Option<u32>,
        by: &'a str,
    ) -> Reply<'a, bool> {
        self.step("set_dial_limit", move |fleet, _| fleet.set_account(account, max_cps, by))
    }
}
