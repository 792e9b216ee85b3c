//! Random operations of diallers.

use super::dice::Dice;
use crate::{
    Allocate, Fleet, Millis, ReservationQuery, Reserve, WaitingDials,
    names::{AccountName, CallSid, PhoneNumber, ReservationId},
};

pub const RESERVATION_TTL: Millis = 6_000;

/// An operation of a dialler, or a limit of an operator; `None` deletes the limit.
#[derive(Debug, Clone)]
pub enum OutboundOperation {
    Reserve(Reserve),
    Dialed {
        id: ReservationId,
        call: CallSid,
    },
    GiveBack {
        id: ReservationId,
    },
    Number {
        number: PhoneNumber,
        max_lines: Option<u32>,
    },
    Account {
        account: AccountName,
        max_cps: Option<u32>,
    },
    /// The report of a router. The random operations have none: each grant is followed by one.
    Waiting {
        router: String,
        waiting: Vec<WaitingDials>,
    },
}

/// Reservations that the operations name.
const IDS: usize = 24;

/// Every id that an operation may name.
pub fn all_reservation_ids() -> impl Iterator<Item = ReservationId> {
    (0..IDS).map(reservation_id)
}

fn reservation_id(number: usize) -> ReservationId {
    format!("R{number:016x}").parse().expect("an id")
}

impl Dice {
    pub(super) fn outbound(&mut self, fleet: &Fleet) -> OutboundOperation {
        match self.roll(13) {
            0..=6 => OutboundOperation::Reserve(self.reserve()),
            7..=9 => OutboundOperation::Dialed { id: self.reservation(fleet), call: self.call() },
            10 => OutboundOperation::GiveBack { id: self.reservation(fleet) },
            11 => {
                let (number, max_lines) = (self.number(), self.roll(5) as u32);
                OutboundOperation::Number { number, max_lines: self.mostly(max_lines) }
            }
            _ => {
                let (account, max_cps) = (self.account(), [0, 1, 3, 1_000][self.roll(4)]);
                OutboundOperation::Account { account, max_cps: self.mostly(max_cps) }
            }
        }
    }

    fn reserve(&mut self) -> Reserve {
        let (first, count) = (self.roll(IDS), 1 + self.roll(6));
        let (number, account) = (self.number(), self.account());
        let accounts = [account, "twilio".parse().expect("an account")];
        Reserve {
            ids: (first..first + count).map(|number| reservation_id(number % IDS)).collect(),
            merchant: self.merchant(),
            number: self.mostly(number),
            accounts: if self.roll(3) == 0 { accounts.to_vec() } else { Vec::new() },
            ttl: RESERVATION_TTL,
            miss_target: [0, 10_000, 10_000, 10_000, 300_000][self.roll(5)],
        }
    }

    /// A reservation, mostly an outstanding one.
    fn reservation(&mut self, fleet: &Fleet) -> ReservationId {
        let query = ReservationQuery { limit: 50, ..Default::default() };
        let known = fleet.reservations(&query, 0).reservations;
        match known.len() {
            len if len > 0 && self.roll(6) > 0 => known[self.roll(len)].id.clone(),
            _ => reservation_id(self.roll(IDS)),
        }
    }

    /// Adds a reservation to some of the requests, mostly with its merchant.
    pub(super) fn with_reservation(&mut self, request: Allocate, fleet: &Fleet) -> Allocate {
        if self.roll(3) > 0 {
            return request;
        }
        let id = self.reservation(fleet);
        let merchant = fleet.reservation(&id).map(|known| known.facts.merchant);
        let merchant = match self.roll(6) {
            0 => request.merchant,
            1 => None,
            _ => merchant.or(request.merchant),
        };
        Allocate { reservation: Some(id), merchant, ..request }
    }

    pub(super) fn numbers(&mut self) -> Vec<PhoneNumber> {
        (0..self.roll(3)).map(|_| self.number()).collect()
    }

    fn number(&mut self) -> PhoneNumber {
        ["+14155550100", "+14155550101", "sip:a@example.com"][self.roll(3)].parse().expect("valid")
    }

    fn account(&mut self) -> AccountName {
        ["twilio", "twilio:AC1", "plivo"][self.roll(3)].parse().expect("an account")
    }

    fn mostly<T>(&mut self, value: T) -> Option<T> {
        (self.roll(4) > 0).then_some(value)
    }
}
