use super::*;
use fleet::{
    Allocate, Claim, Claimant, Hold, PodFacts, PodOrigin, PodWriter, Release, Renew,
    tiers::DocumentSource,
};
use store::{Embedded, StoreMetrics};

const TIERS: &str = r#"{"tiers": {"gold": {"target": 1}, "basic": {"target": 1}},
    "default_chain": ["gold", "basic"]}"#;

struct Setup {
    store: Embedded,
    tiers: Tiers,
    known: HashSet<Pool>,
    tracker: CallTracker,
}

fn pool(name: &str) -> Pool {
    name.parse().unwrap()
}

fn call(number: usize) -> CallSid {
    format!("CA{number}").parse().unwrap()
}

impl Setup {
    /// A store with one pod per tier, after the first update.
    async fn new() -> Self {
        let tiers = Tiers::parse(TIERS, DocumentSource::Settings).unwrap().0;
        let store = Embedded::in_memory(tiers.clone(), 60_000, StoreMetrics::default());
        store.set_event_limit(100);
        let origin = PodOrigin::List;
        let by = Claimant::List { digest: "d".into(), is_new: true };
        let claim = Claim { origin: origin.clone(), by, force: false };
        let epoch = store.claim_pods(&claim).await.unwrap().unwrap();
        for number in 0..2 {
            let facts = PodFacts {
                uid: format!("u{number}"),
                address: "a:1".into(),
                ready: true,
                terminating: false,
                restarts: 0,
                at_risk: false,
                pin: None,
            };
            let writer = PodWriter { origin: &origin, epoch };
            let name = format!("p{number}").parse().unwrap();
            store.observe_pod(&name, &facts, writer).await.unwrap().unwrap();
        }
        let known = HashSet::from([pool("gold"), pool("basic")]);
        let mut setup = Self { store, tiers, known, tracker: CallTracker::default() };
        setup.start(&HashMap::new()).await;
        setup
    }

    async fn start(&mut self, cursors: &HashMap<Pool, EventId>) {
        let pools = Pools { tiers: &self.tiers, known: &self.known };
        self.tracker.start(&self.store, &pools, cursors).await.unwrap();
    }

    async fn update(&mut self) {
        let pools = Pools { tiers: &self.tiers, known: &self.known };
        self.tracker.update(&self.store, &pools).await.unwrap();
    }

    async fn allocate(&self, number: usize, hold: Option<Hold>) {
        let request = Allocate { hold, ..Allocate::new(call(number), None, 60_000) };
        let _ = self.store.allocate(&request).await.unwrap();
    }

    async fn release(&self, number: usize) {
        let _ = self.store.release(&Release::new(call(number), None)).await.unwrap();
    }
}

fn counts(traffic: &Traffic) -> (u64, u64, usize, bool) {
    (traffic.arrivals, traffic.refusals, traffic.durations.len(), traffic.gap)
}

#[tokio::test]
async fn demand_belongs_to_the_first_pool_of_the_chain() {
    let mut setup = Setup::new().await;
    // The second call is served by basic, the third is refused.
    for number in 0..3 {
        setup.allocate(number, None).await;
        // A repeat is no arrival.
        setup.allocate(number, None).await;
    }
    setup.update().await;
    assert_eq!(setup.tracker.calls(&pool("gold")), (2, 0));
    assert_eq!(setup.tracker.calls(&pool("basic")), (0, 0));
    // Each refused attempt counts: the policy cannot tell a repeat from another caller.
    assert_eq!(counts(&setup.tracker.take(&pool("gold"))), (4, 2, 0, false));
    setup.release(1).await;
    setup.update().await;
    assert_eq!(setup.tracker.calls(&pool("gold")), (1, 0));
    assert_eq!(counts(&setup.tracker.take(&pool("gold"))), (0, 0, 1, false));
    assert_eq!(counts(&setup.tracker.take(&pool("basic"))), (0, 0, 0, false));
}

#[tokio::test]
async fn a_waiting_call_arrives_once_and_is_refused_if_it_leaves() {
    let mut setup = Setup::new().await;
    let hold =
        Hold { time: 60_000, poll_timeout: 60_000, max_waiting: 9, max_waiting_per_merchant: 9 };
    for number in 0..4 {
        setup.allocate(number, Some(hold)).await;
    }
    setup.update().await;
    assert_eq!(setup.tracker.calls(&pool("gold")), (2, 2));
    assert_eq!(counts(&setup.tracker.take(&pool("gold"))), (4, 0, 0, false));
    // The first waiting call is handed the pod, the second hangs up.
    setup.release(0).await;
    setup.release(3).await;
    setup.update().await;
    assert_eq!(setup.tracker.calls(&pool("gold")), (2, 0));
    assert_eq!(counts(&setup.tracker.take(&pool("gold"))), (0, 1, 1, false));
}

#[tokio::test]
async fn a_call_that_registers_again_is_no_arrival() {
    let mut setup = Setup::new().await;
    let renew = Renew { calls: vec![call(7)], pod: Some("p0".parse().unwrap()), lease_ttl: 60_000 };
    assert_eq!(setup.store.renew(&renew).await.unwrap().registered, [call(7)]);
    setup.update().await;
    assert_eq!(setup.tracker.calls(&pool("gold")), (1, 0));
    assert_eq!(counts(&setup.tracker.take(&pool("gold"))), (0, 0, 0, false));
}

#[tokio::test]
async fn another_router_counts_from_the_cursor_of_each_pool() {
    let mut setup = Setup::new().await;
    setup.allocate(0, None).await;
    setup.update().await;
    let cursor = setup.tracker.cursor();
    setup.release(0).await;
    setup.allocate(1, None).await;
    setup.start(&HashMap::from([(pool("gold"), cursor)])).await;
    assert_eq!(setup.tracker.calls(&pool("gold")), (1, 0));
    // The duration of the first call is not known to the new router.
    assert_eq!(counts(&setup.tracker.take(&pool("gold"))), (1, 0, 0, false));
    setup.release(1).await;
    setup.update().await;
    assert_eq!(counts(&setup.tracker.take(&pool("gold"))), (0, 0, 1, false));
}

#[tokio::test]
async fn events_lost_during_an_update_are_a_gap() {
    let mut setup = Setup::new().await;
    setup.store.set_event_limit(4 * MIN_PAGE);
    for number in 0..MIN_PAGE {
        setup.allocate(number, None).await;
        setup.release(number).await;
    }
    let Setup { store, tiers, known, tracker } = &mut setup;
    let pools = Pools { tiers, known };
    // Runs when the update pauses after its first read.
    let calls_during_the_pause = async {
        for number in 0..2 * MIN_PAGE {
            let request = Allocate::new(call(number), None, 60_000);
            store.allocate(&request).await.unwrap().unwrap();
            store.release(&Release::new(call(number), None)).await.unwrap().unwrap();
        }
    };
    tokio::join!(tracker.update(store, &pools), calls_during_the_pause).0.unwrap();
    assert!(tracker.take(&pool("gold")).gap);
}

#[tokio::test]
async fn calls_that_arrive_during_a_start_are_counted_once() {
    let mut setup = Setup::new().await;
    setup.store.set_event_limit(4 * MIN_PAGE);
    setup.allocate(0, None).await;
    setup.update().await;
    let cursors = HashMap::from([(pool("gold"), setup.tracker.cursor())]);
    for _ in 0..MIN_PAGE {
        setup.release(0).await;
        setup.allocate(0, None).await;
    }
    let hold =
        Hold { time: 60_000, poll_timeout: 60_000, max_waiting: 9, max_waiting_per_merchant: 9 };
    let Setup { store, tiers, known, tracker } = &mut setup;
    let pools = Pools { tiers, known };
    // Runs when the start pauses after its first read, before it lists the calls.
    let calls_during_the_pause = async {
        for number in 1..3 {
            let request =
                Allocate { hold: Some(hold), ..Allocate::new(call(number), None, 60_000) };
            let _ = store.allocate(&request).await.unwrap();
        }
    };
    tokio::join!(tracker.start(store, &pools, &cursors), calls_during_the_pause).0.unwrap();
    setup.tracker.take(&pool("gold"));
    // Call 2 waits, and is handed the pod of call 0.
    setup.release(0).await;
    setup.update().await;
    assert_eq!(setup.tracker.calls(&pool("gold")), (2, 0));
    assert_eq!(setup.tracker.take(&pool("gold")).arrivals, 2);
    setup.update().await;
    assert_eq!(setup.tracker.take(&pool("gold")).arrivals, 0);
}

#[tokio::test]
async fn lost_events_are_a_gap_and_the_calls_are_listed_again() {
    let mut setup = Setup::new().await;
    setup.allocate(0, None).await;
    setup.update().await;
    let cursor = setup.tracker.cursor();
    setup.tracker.take(&pool("gold"));
    for number in 1..120 {
        setup.allocate(number, None).await;
        setup.release(number).await;
    }
    setup.update().await;
    assert_eq!(setup.tracker.calls(&pool("gold")), (1, 0));
    assert!(setup.tracker.take(&pool("gold")).gap && setup.tracker.take(&pool("basic")).gap);
    setup.allocate(1_000, None).await;
    setup.update().await;
    assert_eq!(counts(&setup.tracker.take(&pool("gold"))), (1, 0, 0, false));
    // A router that starts from a lost event, or from one of another log.
    setup.start(&HashMap::from([(pool("gold"), cursor)])).await;
    assert!(setup.tracker.take(&pool("gold")).gap);
    let later = EventId { at: u64::MAX - 1, number: 0 };
    setup.start(&HashMap::from([(pool("gold"), later)])).await;
    assert!(setup.tracker.take(&pool("gold")).gap);
    assert_eq!(setup.tracker.calls(&pool("gold")), (2, 0));
}
