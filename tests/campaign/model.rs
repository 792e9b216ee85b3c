//! The capacity of the real model, with checks of every grant.

use std::collections::VecDeque;

use fleet::{
    Allocate, DialLimit, Fleet, HeldDials, Millis, NotReleased, PodOrigin, PodWriter,
    RefusalReason, Release, Reserve,
    names::{AccountName, CallSid, MerchantId, PhoneNumber, ReservationId},
    tiers::{DocumentSource, InboundReserve, Tiers},
};
use testkit::redis::ready_pod;

use crate::simulation::{Campaign, Capacity, Number, Refused};

const LEASE: Millis = 3_600_000;
const RESERVATION_TTL: Millis = 75_000;
const WRITER: PodWriter = PodWriter { origin: &PodOrigin::List, epoch: 0 };

/// Limits that a campaign may have beside its pods.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Limits {
    /// Millionths.
    pub(crate) miss_target: u32,
    pub(crate) max_lines: Option<u32>,
    pub(crate) max_cps: Option<u32>,
}

pub(crate) struct Model {
    fleet: Fleet,
    limits: Limits,
    pods: u64,
    reserve: u64,
    live: u64,
    merchant: MerchantId,
    number: PhoneNumber,
    account: AccountName,
    /// The grants of the last second.
    grants: VecDeque<Millis>,
}

impl Model {
    pub(crate) fn new(campaign: Campaign, limits: Limits) -> Self {
        let Campaign { pods, inbound_reserve, .. } = campaign;
        let tiers = format!(
            r#"{{"gold": {{"type": "exclusive", "inbound_reserve": "{inbound_reserve}%"}}}}"#
        );
        let (tiers, _) = Tiers::parse(&tiers, DocumentSource::Settings).expect("a tier table");
        let mut fleet = Fleet::new(tiers, 0);
        for pod in 0..pods {
            let pod = format!("agent-{pod}").parse().expect("a pod name");
            fleet.observe_pod(&pod, &ready_pod(), WRITER, 0).expect("the list writes pods");
        }
        let number: PhoneNumber = "+14155550100".parse().expect("a number");
        let account: AccountName = "twilio".parse().expect("an account");
        if let Some(max_lines) = limits.max_lines {
            fleet.set_number(&number, Some(max_lines), "test");
        }
        if let Some(max_cps) = limits.max_cps {
            fleet.set_account(&account, Some(max_cps), "test");
        }
        Self {
            fleet,
            limits,
            pods,
            reserve: InboundReserve::Share(inbound_reserve).of_slots(pods),
            live: 0,
            merchant: "acme".parse().expect("a merchant"),
            number,
            account,
            grants: VecDeque::new(),
        }
    }

    /// Teaches the model an answer rate, with as many outstanding dials as a campaign has. The pods
    /// are idle afterwards.
    pub(crate) fn learn(&mut self, answer_rate: f64) {
        const DIALS: u64 = 1_000;
        let outstanding = self.pods / 4;
        let number = |dial: u64| Number::MAX - dial;
        for dial in 0..DIALS + outstanding {
            if dial < DIALS {
                self.reserve(number(dial), false, 0)
                    .unwrap_or_else(|_| panic!("dial {dial} is refused"));
            }
            let Some(ended) = dial.checked_sub(outstanding) else { continue };
            let answers = |dials: u64| (dials as f64 * answer_rate).floor();
            if answers(ended + 1) > answers(ended) {
                assert!(self.answer(number(ended), 0), "dial {ended} has no pod");
                self.end_call(number(ended), 0);
            } else {
                self.end_dial(number(ended), 0);
            }
        }
    }

    fn held(&self) -> u64 {
        let pools = self.fleet.outbound_status().pools;
        pools.first().map_or(0, |(_, HeldDials { held, .. })| *held)
    }

    fn free(&self) -> u64 {
        self.pods - self.live
    }

    fn lines(&self) -> usize {
        self.fleet.numbers().first().map_or(0, |number| number.lines)
    }

    fn check_grant(&mut self, now: Millis) {
        let (free, held) = (self.free(), self.held());
        assert!(held + self.reserve <= free, "at {now}: {held} of {free} slots are held");
        if let Some(max_lines) = self.limits.max_lines {
            let lines = self.lines();
            assert!(lines <= max_lines as usize, "at {now}: {lines} lines are in use");
        }
        self.grants.push_back(now);
        while self.grants.front().is_some_and(|at| at + 1_000 <= now) {
            self.grants.pop_front();
        }
        if let Some(max_cps) = self.limits.max_cps {
            let grants = self.grants.len();
            assert!(grants <= max_cps as usize, "{grants} dials in the second before {now}");
        }
    }

    /// Checks that the campaign left nothing behind.
    pub(crate) fn expect_no_leak(&self) {
        assert_eq!(self.fleet.outbound_status().reservations, 0, "reservations");
        assert_eq!((self.held(), self.lines(), self.live), (0, 0, 0), "held slots, lines, calls");
        assert_eq!(self.fleet.status().active_calls, 0, "live calls");
    }
}

fn reservation(dial: Number) -> ReservationId {
    format!("R{dial:016x}").parse().expect("a reservation")
}

fn call(number: Number) -> CallSid {
    format!("CA{number}").parse().expect("a call")
}

impl Capacity for Model {
    fn reserve(&mut self, dial: Number, _: bool, now: Millis) -> Result<(), Refused> {
        let request = Reserve {
            ids: vec![reservation(dial)],
            merchant: self.merchant.clone(),
            number: Some(self.number.clone()),
            accounts: vec![self.account.clone()],
            ttl: RESERVATION_TTL,
            miss_target: self.limits.miss_target,
        };
        let reserved = self.fleet.reserve(&request, now);
        if reserved.granted.is_empty() {
            let is_rate = reserved.limit == Some(DialLimit::MaxCps);
            return Err(Refused { retry_after: is_rate.then_some(reserved.retry_after) });
        }
        self.check_grant(now);
        let dialed = self.fleet.dialed(&reservation(dial), &call(dial), RESERVATION_TTL, now);
        dialed.expect("the reservation is outstanding");
        Ok(())
    }

    fn answer(&mut self, dial: Number, now: Millis) -> bool {
        let mut request = Allocate::new(call(dial), Some(self.merchant.clone()), LEASE);
        request.reservation = Some(reservation(dial));
        let free = self.free();
        let served = self.fleet.allocate(&request, now);
        assert_eq!(served.is_ok(), free > 0, "at {now}: {free} free slots, {served:?}");
        self.live += u64::from(served.is_ok());
        served.is_ok()
    }

    fn end_dial(&mut self, dial: Number, now: Millis) {
        let ended = self.fleet.release(&Release::new(call(dial), None), now);
        assert_eq!(ended, Err(NotReleased::WasDialed), "dial {dial}");
    }

    fn accept_inbound(&mut self, number: Number, now: Millis) -> bool {
        let mut request = Allocate::new(call(number), Some(self.merchant.clone()), LEASE);
        request.numbers = vec![self.number.clone()];
        let (free, held) = (self.free(), self.held());
        let served = self.fleet.allocate(&request, now);
        assert_eq!(served.is_ok(), free > held, "at {now}: {free} free slots, {held} held");
        if let Err(refusal) = &served {
            assert_eq!(refusal.reason, RefusalReason::NoPods);
        }
        self.live += u64::from(served.is_ok());
        served.is_ok()
    }

    fn end_call(&mut self, number: Number, now: Millis) {
        self.fleet.release(&Release::new(call(number), None), now).expect("the call is live");
        self.live -= 1;
    }

    fn sweep(&mut self, now: Millis) {
        let swept = self.fleet.sweep(1_000, now);
        assert!(swept.expired.is_empty(), "{swept:?}");
    }
}
