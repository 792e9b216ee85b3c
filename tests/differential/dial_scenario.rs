//! A fixed series of dials: many outstanding ones, waiting callers, limits to the millisecond.
//! Random operations rarely reach these states.

use fleet::{
    Allocate, Confirm, Hold, PodFacts, Release, Renew, Reserve, WaitingDials,
    names::{AccountName, CallSid, MerchantId, PhoneNumber, PodName, ReservationId},
    rules::{ANSWER_RATE_TTL, MAX_COUNTED_LOADS, MAX_WAITING_DIALS, WAITING_DIALS_TTL},
    tiers::{DocumentSource, Tiers},
};
use store::{Functions, Store};
use testkit::{
    operations::{LEASE_TTL, Operation, OutboundOperation, RESERVATION_TTL, table},
    redis::{WRITER, ready_pod},
};

use super::compare::{Pair, Schema, TIMEOUTS};

const PODS: u64 = 40;
/// Slots of a pod, more than the pods have calls.
const CAP: usize = 300;
/// The default chain of this table is one pool.
const ONE_POOL: usize = 5;
const NUMBER: &str = "+14155550100";
/// Millionths.
const MISS_TARGET: u32 = 10_000;
const HOLD: Hold =
    Hold { time: 20_000, poll_timeout: 20_000, max_waiting: 9, max_waiting_per_merchant: 9 };

fn reservation(number: u64) -> ReservationId {
    format!("R{number:016x}").parse().unwrap()
}

fn call(name: &str, number: u64) -> CallSid {
    format!("{name}{number}").parse().unwrap()
}

fn merchant() -> MerchantId {
    "m1".parse().unwrap()
}

fn batch(ids: std::ops::Range<u64>) -> Reserve {
    Reserve {
        ids: ids.map(reservation).collect(),
        merchant: merchant(),
        number: None,
        accounts: Vec::new(),
        ttl: RESERVATION_TTL,
        miss_target: MISS_TARGET,
    }
}

fn dialed(id: u64, call: CallSid) -> OutboundOperation {
    OutboundOperation::Dialed { id: reservation(id), call }
}

impl Pair {
    /// Runs an operation, and compares events, indexes and dials.
    async fn check(&mut self, operation: Operation) -> Result<(), String> {
        let compared = match self.run(&operation).await {
            Ok(()) => self.events_agree().and(self.outbound_agrees().await),
            error => error,
        };
        compared.map_err(|error| format!("after {operation:?}: {error}"))
    }

    async fn outbound(&mut self, operation: OutboundOperation) -> Result<(), String> {
        self.check(Operation::Outbound(operation)).await
    }

    async fn reserve(&mut self, request: Reserve) -> Result<(), String> {
        self.outbound(OutboundOperation::Reserve(request)).await
    }

    async fn callback(&mut self, call: CallSid) -> Result<(), String> {
        self.check(Operation::Release(Release::new(call, None))).await
    }

    /// Advances the clock, and sweeps.
    async fn pass(&mut self, time: u64) -> Result<(), String> {
        self.now += time;
        self.server.set_time(self.now);
        self.check(Operation::Sweep { limit: 1_000 }).await
    }

    async fn start_pods(&mut self) -> Result<(), String> {
        self.check(Operation::Tiers { tiers: table(ONE_POOL), expected: None }).await?;
        let facts = PodFacts { pin: Some("gold".parse().unwrap()), ..ready_pod() };
        for number in 0..PODS {
            self.start_pod(&format!("p-{number}").parse().unwrap(), &facts).await?;
        }
        self.events_agree()
    }

    async fn start_pod(&mut self, pod: &PodName, facts: &PodFacts) -> Result<(), String> {
        let written = self.store.observe_pod(pod, facts, WRITER).await;
        written.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
        let written = self.fleet.observe_pod(pod, facts, WRITER, self.now);
        written.map(drop).map_err(|error| error.to_string())
    }

    /// Dials without an answer: the answer rate falls.
    async fn learn(&mut self, dials: u64) -> Result<(), String> {
        for number in 0..dials {
            self.reserve(batch(number..number + 1)).await?;
            self.outbound(dialed(number, call("learned", number))).await?;
            self.callback(call("learned", number)).await?;
        }
        Ok(())
    }

    /// More outstanding dials than have ended, and a caller who waits for a slot that is held.
    async fn fill(&mut self) -> Result<(), String> {
        self.reserve(batch(100..150)).await?;
        // A repeat of the same request.
        self.reserve(batch(100..150)).await?;
        self.reserve(batch(150..250)).await?;
        let mut waiting = Allocate::new(call("waiting", 0), None, LEASE_TTL);
        waiting.hold = Some(HOLD);
        self.check(Operation::Allocate(waiting)).await?;
        // With this target fewer slots are held, but callers precede diallers.
        self.reserve(Reserve { miss_target: 300_000, ..batch(300..301) }).await?;
        for id in 100..110 {
            self.outbound(OutboundOperation::GiveBack { id: reservation(id) }).await?;
        }
        self.check(Operation::Release(Release::new(call("waiting", 0), None))).await
    }

    /// A caller who waits gets the slot of a reservation that expires.
    async fn expire(&mut self) -> Result<(), String> {
        self.reserve(batch(800..900)).await?;
        self.pass(1).await?;
        let mut waiting = Allocate::new(call("waiting", 1), None, LEASE_TTL);
        waiting.hold = Some(HOLD);
        self.check(Operation::Allocate(waiting)).await?;
        self.pass(RESERVATION_TTL).await?;
        self.callback(call("waiting", 1)).await
    }

    /// Another miss target, with dials of another pool outstanding.
    async fn change_target(&mut self) -> Result<(), String> {
        let document = Some(r#"{"fallback": ["basic"]}"#);
        self.check(Operation::Merchant { id: merchant(), document, expected: None }).await?;
        let facts = PodFacts { pin: Some("basic".parse().unwrap()), ..ready_pod() };
        self.start_pod(&"p-basic".parse().unwrap(), &facts).await?;
        self.reserve(Reserve { miss_target: 300_000, ..batch(400..401) }).await?;
        self.check(Operation::Merchant { id: merchant(), document: None, expected: None }).await
    }

    /// Reports of dials, and the end of reservations at their deadline.
    async fn report(&mut self) -> Result<(), String> {
        self.reserve(batch(500..503)).await?;
        self.outbound(dialed(500, call("dial", 1))).await?;
        self.pass(RESERVATION_TTL / 2).await?;
        // A repeat keeps the deadline; another call replaces the first, and has a new one.
        self.outbound(dialed(500, call("dial", 1))).await?;
        self.outbound(dialed(501, call("dial", 1))).await?;
        self.outbound(dialed(501, call("dial", 2))).await?;
        self.outbound(dialed(501, call("dial", 3))).await?;
        self.callback(call("dial", 2)).await?;
        self.pass(RESERVATION_TTL / 2 - 1).await?;
        for _ in 0..2 {
            // The deadlines of 500 and 502, then a millisecond later.
            self.now += 1;
            self.server.set_time(self.now);
            self.outbound(dialed(502, call("dial", 4))).await?;
            self.outbound(OutboundOperation::GiveBack { id: reservation(502) }).await?;
            let mut request = Allocate::new(call("late", self.now), None, LEASE_TTL);
            request.reservation = Some(reservation(502));
            self.check(Operation::Allocate(request)).await?;
        }
        self.pass(0).await?;
        self.callback(call("dial", 3)).await?;
        self.pass(LEASE_TTL).await
    }

    /// The limits of calls, lines and calls per second in batches, and times to wait.
    async fn limit(&mut self) -> Result<(), String> {
        let document = Some(r#"{"max_calls": 6}"#);
        self.check(Operation::Merchant { id: merchant(), document, expected: None }).await?;
        // A call with the name of a reservation.
        let named = reservation(600).as_str().parse().unwrap();
        self.check(Operation::Allocate(Allocate::new(named, Some(merchant()), LEASE_TTL))).await?;
        self.reserve(batch(600..610)).await?;
        self.reserve(batch(610..611)).await?;
        self.check(Operation::Merchant { id: merchant(), document: None, expected: None }).await?;
        let account: AccountName = "twilio".parse().unwrap();
        for max_cps in [0, 3] {
            let (account, max_cps) = (account.clone(), Some(max_cps));
            self.outbound(OutboundOperation::Account { account, max_cps }).await?;
            for (id, time) in [(620, 100), (622, 233), (624, 1), (626, 100)] {
                self.reserve(Reserve {
                    accounts: vec![account_without_limit(), "twilio".parse().unwrap()],
                    ..batch(id..id + 2)
                })
                .await?;
                self.pass(time).await?;
            }
        }
        self.pass(2 * RESERVATION_TTL).await
    }

    /// A late confirmation takes the line of its number again.
    async fn confirm_late(&mut self) -> Result<(), String> {
        let (number, max_lines) = (NUMBER.parse().unwrap(), Some(3));
        self.outbound(OutboundOperation::Number { number, max_lines }).await?;
        let late = call("c", 1);
        let mut request = Allocate::new(late.clone(), None, 3_000);
        (request.provisional, request.may_return) = (true, true);
        request.numbers = vec![NUMBER.parse().unwrap()];
        self.check(Operation::Allocate(request)).await?;
        let pod = self.fleet.call(&late).expect("the call has a pod").pod;
        self.pass(3_000).await?;
        let confirm = Confirm { call: late.clone(), pod, pod_attempt: None, lease_ttl: LEASE_TTL };
        self.check(Operation::Confirm(confirm)).await?;
        self.reserve(Reserve { number: NUMBER.parse().ok(), ..batch(700..705) }).await?;
        self.callback(late).await?;
        self.reserve(Reserve { number: NUMBER.parse().ok(), ..batch(705..710) }).await?;
        self.pass(RESERVATION_TTL).await
    }

    /// Reports of waiting dials by two routers, within limits, until they expire.
    async fn wait_for_pods(&mut self) -> Result<(), String> {
        let other: MerchantId = "other".parse().unwrap();
        let number: Option<PhoneNumber> = NUMBER.parse().ok();
        let of = |merchant: &MerchantId, number: &Option<PhoneNumber>, dials| WaitingDials {
            merchant: merchant.clone(),
            number: number.clone(),
            dials,
        };
        let acme = merchant();
        self.learn(30).await?;
        self.waiting("r1", vec![of(&acme, &None, 7), of(&acme, &number, 20)]).await?;
        self.waiting("r2", vec![of(&acme, &number, 20), of(&other, &None, MAX_WAITING_DIALS + 1)])
            .await?;
        let limited = number.clone().expect("a number");
        let limit = |max_lines| OutboundOperation::Number { number: limited.clone(), max_lines };
        self.outbound(limit(Some(9))).await?;
        self.reserve(Reserve { number: number.clone(), ..batch(950..953) }).await?;
        for document in [
            r#"{"max_calls": 8}"#,
            r#"{"pool": "nowhere", "fallback": ["nothing", "basic", "gold"]}"#,
            r#"{"pool": "nowhere", "dedicated_only": true}"#,
        ] {
            let (id, document) = (acme.clone(), Some(document));
            self.check(Operation::Merchant { id, document, expected: None }).await?;
        }
        let id = acme.clone();
        self.check(Operation::Merchant { id, document: None, expected: None }).await?;
        self.outbound(limit(None)).await?;
        self.waiting("r1", Vec::new()).await?;
        self.pass(WAITING_DIALS_TTL / 2).await?;
        self.waiting("r1", vec![of(&acme, &None, 5)]).await?;
        for time in [WAITING_DIALS_TTL / 2 - 1, 1, WAITING_DIALS_TTL / 2] {
            self.pass(time).await?;
        }
        self.pass(RESERVATION_TTL).await
    }

    /// Answers while no pod is in service, and repeats of their requests.
    async fn repeat_answers(&mut self) -> Result<(), String> {
        self.reserve(Reserve { number: NUMBER.parse().ok(), ..batch(980..984) }).await?;
        let answer = |name: u64, id| {
            let mut request = Allocate::new(call("answer", name), None, LEASE_TTL);
            request.reservation = Some(reservation(id));
            Operation::Allocate(request)
        };
        for pod in self.fleet.pod_names() {
            self.check(Operation::Drain { pod, ttl: LEASE_TTL }).await?;
        }
        for (name, id) in [(0, 980), (0, 980), (1, 980), (0, 981), (0, 980), (2, 982), (3, 983)] {
            self.check(answer(name, id)).await?;
        }
        self.check(Operation::Undrain { pod: "p-0".parse().unwrap() }).await?;
        for (name, id) in [(0, 981), (0, 981), (1, 980)] {
            self.check(answer(name, id)).await?;
        }
        self.reserve(batch(990..991)).await?;
        self.outbound(dialed(990, call("answer", 0))).await?;
        self.callback(call("answer", 0)).await?;
        self.check(answer(0, 981)).await?;
        self.callback(call("answer", 0)).await?;
        self.pass(RESERVATION_TTL - 1).await?;
        self.check(answer(2, 982)).await?;
        self.callback(call("answer", 2)).await?;
        self.pass(1).await?;
        self.check(answer(3, 983)).await?;
        self.pass(LEASE_TTL).await
    }

    /// Free slots of pods with more different numbers of calls than are counted exactly. The inbound
    /// reserve leaves some of them.
    async fn count_slots(&mut self) -> Result<(), String> {
        const PODS: usize = MAX_COUNTED_LOADS + 6;
        let exact: usize = (0..MAX_COUNTED_LOADS).map(|calls| CAP - calls).sum();
        let reserve = exact + PODS - MAX_COUNTED_LOADS - 60;
        let text = format!(
            r#"{{"deep": {{"type": "shared", "target": 1, "max_concurrent": {CAP},
                "inbound_reserve": {reserve}}}}}"#
        );
        let (tiers, _) = Tiers::parse(&text, DocumentSource::Settings).unwrap();
        self.check(Operation::Tiers { tiers, expected: None }).await?;
        for number in 0..PODS {
            let pod: PodName = format!("p-{number}").parse().unwrap();
            self.start_pod(&pod, &ready_pod()).await?;
            let calls = (0..number).map(|call_number| call(&format!("{pod}-"), call_number as u64));
            let renew =
                Renew { calls: calls.collect(), pod: Some(pod.clone()), lease_ttl: LEASE_TTL };
            if number > 0 {
                self.check(Operation::Renew(renew)).await?;
            }
        }
        for first in [0, 50] {
            self.reserve(Reserve { miss_target: 0, ..batch(first..first + 50) }).await?;
        }
        let dials = self.fleet.outbound_status().reservations;
        same!("granted", dials, 60);
        Ok(())
    }

    async fn waiting(&mut self, router: &str, waiting: Vec<WaitingDials>) -> Result<(), String> {
        self.outbound(OutboundOperation::Waiting { router: router.into(), waiting }).await
    }

    /// A learned answer rate is forgotten to the millisecond.
    async fn forget(&mut self) -> Result<(), String> {
        self.learn(10).await?;
        for time in [ANSWER_RATE_TTL - 1, 1, 1] {
            self.pass(time).await?;
        }
        Ok(())
    }
}

/// An account without a limit of its own: that of its provider applies.
fn account_without_limit() -> AccountName {
    "twilio:AC1".parse().unwrap()
}

/// Runs the series on both stores. Returns the first disagreement. A run in which Redis did not
/// reply in time, on a busy machine, is repeated.
pub(crate) async fn compare_dials(functions: impl Fn() -> Functions) -> Result<(), String> {
    for _ in 0..5 {
        let mut pair = Pair::new(functions(), Schema::Two).await;
        let mut outcome = run_all(&mut pair).await;
        pair.store.close().await;
        if outcome.is_ok() {
            let mut pair = Pair::new(functions(), Schema::Two).await;
            outcome = pair.count_slots().await;
            pair.store.close().await;
        }
        match outcome {
            Err(error) if TIMEOUTS.iter().any(|it| error.contains(it)) => {
                println!("repeating the run: {error}");
            }
            outcome => return outcome,
        }
    }
    Err("Redis does not reply in time".into())
}

async fn run_all(pair: &mut Pair) -> Result<(), String> {
    pair.start_pods().await?;
    pair.learn(30).await?;
    pair.fill().await?;
    pair.change_target().await?;
    pair.expire().await?;
    pair.report().await?;
    pair.limit().await?;
    pair.confirm_late().await?;
    pair.wait_for_pods().await?;
    pair.repeat_answers().await?;
    pair.forget().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_series_of_dials_is_the_same_in_both_stores() {
    compare_dials(Functions::default).await.unwrap_or_else(|error| panic!("{error}"));
}
