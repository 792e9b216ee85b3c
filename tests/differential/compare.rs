//! One model, two stores: random operations on a real Redis and on the fleet;
//! every answer and every view must agree.

use std::{collections::HashMap, sync::Arc, time::Duration};

use fleet::{
    Allocation, CallQuery, Edit, Event, EventKind, Fleet, Found, Millis, PodStatus, Refusal,
    Removed,
    merchant::Malformed,
    names::{CallSid, PodName},
    rules::CALL_HISTORY_TTL,
};
use store::{Redis, RedisConfig, Scripts, Store, Ttls};

use testkit::{
    dice::Dice,
    operations::{LEASE, Operation, TRUST, table},
    redis::{RedisServer, store_config, unix_millis},
};

/// An outcome as both sides can say it: why a document is malformed is told in
/// different words.
fn plain(outcome: Result<Allocation, Refusal>) -> Result<Allocation, Refusal> {
    let same_words = |malformed: Option<Malformed>| malformed.map(|_| Malformed::new("malformed"));
    match outcome {
        Ok(mut got) => {
            got.malformed_merchant = same_words(got.malformed_merchant);
            Ok(got)
        }
        Err(mut refusal) => {
            refusal.malformed_merchant = same_words(refusal.malformed_merchant);
            Err(refusal)
        }
    }
}

/// Which pod each call has: those that were drawn are among them.
async fn chosen(store: &Redis) -> Result<HashMap<CallSid, PodName>, String> {
    let pods = store.pods().await.map_err(|error| error.to_string())?;
    let calls = |pod: PodStatus| {
        let name = pod.name;
        pod.calls.into_iter().map(move |call| (call.call, name.clone()))
    };
    Ok(pods.into_iter().flat_map(calls).collect())
}

fn down(error: store::StoreError) -> String {
    format!("the store failed: {error}")
}

macro_rules! same {
    ($what:expr, $redis:expr, $fleet:expr) => {{
        let (redis, fleet) = (&$redis, &$fleet);
        if redis != fleet {
            return Err(format!("{}: Redis says {redis:?}, the fleet {fleet:?}", $what));
        }
    }};
}

/// A fleet and a Redis that do the same operations.
pub(crate) struct Pair {
    pub(crate) server: RedisServer,
    pub(crate) store: Arc<Redis>,
    pub(crate) fleet: Fleet,
    pub(crate) plain: redis::Connection,
    pub(crate) now: u64,
    pub(crate) unswept: u32,
    /// Up to which event we have looked.
    pub(crate) seen: String,
}

impl Pair {
    async fn new(scripts: Scripts) -> Self {
        let now = unix_millis();
        let server = RedisServer::with_held_clock(now);
        let ttls =
            Ttls { lease: TRUST, draining: LEASE, call_info: LEASE, connect: None, patience: None };
        let config = RedisConfig { ttls, scripts, ..store_config(&server, table(0)) };
        let store = Redis::start(config).unwrap();
        store.first_contact(Duration::from_secs(5)).await.unwrap();
        assert_eq!(store.outage(), None);
        let plain = server.connection();
        let mut fleet = Fleet::new(table(0), now + TRUST);
        fleet.keep_events();
        let mut pair = Self { server, store, fleet, plain, now, unswept: 0, seen: "-".into() };
        // (that the tiers are in force, which the fleet began with)
        pair.told().unwrap();
        pair
    }

    /// Does one operation on both sides; what it was.
    async fn step(&mut self, dice: &mut Dice) -> Result<String, String> {
        let operation = dice.operation(&mut self.fleet, self.now);
        match &operation {
            Operation::Observe { .. } | Operation::Remove { .. } | Operation::Move { .. } => {
                self.write_pod(&operation).await?;
            }
            Operation::Wait { time } => self.wait(*time).await?,
            _ => self.ask(&operation).await?,
        }
        Ok(format!("{operation:?}"))
    }

    async fn ask(&mut self, operation: &Operation) -> Result<(), String> {
        let (store, fleet, now) = (self.store.clone(), &mut self.fleet, self.now);
        let what = format!("{operation:?}");
        match operation {
            Operation::Allocate(request) => {
                let outcome = store.allocate(request).await.map_err(down)?;
                let chosen = outcome.iter().map(|got| (request.call.clone(), got.pod.clone()));
                fleet.favour(chosen.collect());
                same!(what, plain(outcome), plain(fleet.allocate(request, now)));
            }
            Operation::Release(request) => {
                let outcome = store.release(request).await.map_err(down)?;
                same!(what, outcome, fleet.release(request, now));
            }
            Operation::Renew(request) => {
                let outcome = store.renew(request).await.map_err(down)?;
                same!(what, outcome, fleet.renew(request, now));
            }
            Operation::Confirm(request) => {
                let outcome = store.confirm(request).await.map_err(down)?;
                same!(what, outcome, fleet.confirm(request, now));
            }
            Operation::ExtendPending { time } => {
                store.spare(*time).await.map_err(down)?;
                fleet.spare(*time, now);
            }
            Operation::Drain { pod, ttl } => {
                let outcome = store.drain(pod, *ttl).await.map_err(down)?;
                same!(what, outcome, fleet.drain(pod, *ttl, now));
            }
            Operation::Undrain { pod } => {
                let outcome = store.undrain(pod).await.map_err(down)?;
                same!(what, outcome, fleet.undrain(pod));
            }
            Operation::Claim(claim) => {
                let outcome = store.claim_pods(claim).await.map_err(down)?;
                same!(what, outcome, fleet.claim_pods(claim, now));
            }
            Operation::Tiers { tiers, instead_of } => {
                let edit = || Edit { instead_of: instead_of.as_ref(), by: "admin (token 2)" };
                let outcome = store.apply_tiers(tiers, edit()).await.map_err(down)?;
                same!(what, outcome, fleet.apply_tiers(tiers, edit()));
            }
            Operation::Merchant { id, document, instead_of } => {
                let edit = || Edit { instead_of: *instead_of, by: "admin (token 2)" };
                let outcome = store.set_merchant(id, *document, edit()).await.map_err(down)?;
                same!(what, outcome, fleet.set_merchant(id, *document, edit()));
            }
            Operation::Sweep { most } => {
                let outcome = store.sweep(*most).await.map_err(down)?;
                same!(what, outcome, fleet.sweep(*most, now));
            }
            Operation::Audit => {
                let mut names = fleet.pod_names();
                names.sort();
                same!(what, store.audit().await.map_err(down)?, fleet.audit(&names));
            }
            other => return Err(format!("{other:?} is done elsewhere")),
        }
        Ok(())
    }

    /// What a source of pods writes. The fleet gives calls that it has to reseat the pods that
    /// Redis chose.
    async fn write_pod(&mut self, operation: &Operation) -> Result<(), String> {
        let (store, fleet, now) = (self.store.clone(), &mut self.fleet, self.now);
        let what = format!("{operation:?}");
        match operation {
            Operation::Observe { pod, facts, writer } => {
                let mut redis = store.observe_pod(pod, facts, writer.get()).await.map_err(down)?;
                fleet.favour(chosen(&store).await?);
                let mut ours = fleet.observe_pod(pod, facts, writer.get(), now);
                for observed in [&mut redis, &mut ours].into_iter().flatten() {
                    observed.ended.sort_by(|a, b| a.call.cmp(&b.call));
                }
                same!(what, redis, ours);
            }
            Operation::Remove { pod, uid, departure, writer } => {
                let redis = store.remove_pod(pod, uid, *departure, writer.get()).await;
                let mut redis = redis.map_err(down)?;
                fleet.favour(chosen(&store).await?);
                let mut ours = fleet.remove_pod(pod, uid, *departure, writer.get(), now);
                for removed in [&mut redis, &mut ours] {
                    if let Ok(Removed::Gone { ended }) = removed {
                        ended.sort_by(|a, b| a.call.cmp(&b.call));
                    }
                }
                same!(what, redis, ours);
            }
            Operation::Move { pod, uid, to, writer } => {
                let redis = store.move_pod(pod, uid, to, writer.get()).await.map_err(down)?;
                same!(what, redis, fleet.move_pod(pod, uid, to, writer.get()));
            }
            other => return Err(format!("{other:?} writes no pod")),
        }
        Ok(())
    }

    /// Moves time; not so far without a sweep that TTLs would tidy up first.
    async fn wait(&mut self, time: Millis) -> Result<(), String> {
        self.now += time;
        self.server.set_time(self.now);
        self.unswept += 1;
        if self.unswept.is_multiple_of(8) {
            let swept = self.store.sweep(100).await.map_err(down)?;
            same!("the great sweep", swept, self.fleet.sweep(100, self.now));
        }
        Ok(())
    }

    /// Lets nearly the time pass for which ended calls are remembered, so that the operations
    /// after it meet its end. In steps, because a sweep has to come before TTLs.
    async fn wait_for_history(&mut self, dice: &mut Dice) -> Result<(), String> {
        const STEP: Millis = 15_000;
        let steps = CALL_HISTORY_TTL / STEP - dice.roll(3) as Millis;
        for _ in 0..steps {
            self.now += STEP;
            self.server.set_time(self.now);
            let swept = self.store.sweep(100).await.map_err(down)?;
            same!("a sweep", swept, self.fleet.sweep(100, self.now));
            self.events_agree()?;
        }
        Ok(())
    }

    /// What Redis has told since the last time.
    fn told(&mut self) -> Result<Vec<Event>, String> {
        let mut range = redis::cmd("XRANGE");
        let told: Vec<(String, Vec<String>)> = range
            .arg("voice:events")
            .arg(&self.seen)
            .arg("+")
            .query(&mut self.plain)
            .map_err(|error| error.to_string())?;
        if let Some((last, _)) = told.last() {
            self.seen = format!("({last}");
        }
        let read = |(_, fields): &(String, Vec<String>)| Event::read(&fields[0], &fields[1]);
        told.iter().map(|entry| read(entry).ok_or_else(|| format!("no event: {entry:?}"))).collect()
    }

    /// What both have told since the last time. Where all pods are looked at, the order is
    /// each store's own.
    fn events_agree(&mut self) -> Result<(), String> {
        let mut told = self.told()?;
        let mut ours = self.fleet.take_events();
        if told.iter().filter(|event| event.kind == EventKind::Moved).count() > 1 {
            told.sort();
            ours.sort();
        }
        same!("what happened", told, ours);
        Ok(())
    }

    async fn views_agree(&mut self) -> Result<(), String> {
        let status = self.store.status().await.map_err(|error| error.to_string())?;
        same!("status", status, self.fleet.status());
        let pods = self.store.pods().await.map_err(|error| error.to_string())?;
        same!("pods", pods, self.fleet.pods());
        Ok(())
    }

    /// Where every call is.
    async fn calls_agree(&mut self) -> Result<(), String> {
        for number in 0..14 {
            let call: CallSid = format!("c{number}").parse().unwrap();
            let found = self.store.call(&call).await.map_err(|error| error.to_string())?;
            same!(format!("call {call}"), found, self.fleet.find(&call));
        }
        for number in (0..12).filter(|it| it % 4 == self.now as usize % 4) {
            let query = CallQuery {
                waiting: number % 3 == 0,
                pool: (number % 4 == 1).then(|| "pool:gold".parse().unwrap()),
                merchant: (number % 2 == 1).then(|| "m1".parse().unwrap()),
                pod: (number > 9).then(|| "p1".parse().unwrap()),
                after: None,
                most: 1 + number % 5,
            };
            let ours = self.fleet.calls(&CallQuery { most: usize::MAX, ..query.clone() });
            same!(format!("{query:?}"), self.all_calls(query.clone()).await?, ours.calls);
        }
        let merchants = self.store.merchants(None, 100).await.map_err(|it| it.to_string())?;
        same!("merchants", merchants, self.fleet.merchants(None, 100));
        Ok(())
    }

    /// All pages of a query.
    async fn all_calls(&self, mut query: CallQuery) -> Result<Vec<Found>, String> {
        let mut all = Vec::new();
        loop {
            let page = self.store.calls(&query).await.map_err(|error| error.to_string())?;
            if page.calls.len() > query.most {
                return Err(format!("more than was asked for: {query:?}"));
            }
            all.extend(page.calls);
            if page.next.is_none() {
                return Ok(all);
            }
            query.after = page.next;
        }
    }
}

/// Runs so many operations; the first disagreement, with what led to it. An operation that Redis
/// did not answer in time, on a busy machine, is no disagreement: the run begins again.
pub(crate) async fn compare(
    seed: u64,
    operations: usize,
    scripts: impl Fn() -> Scripts,
) -> Result<(), String> {
    for _ in 0..5 {
        match compare_once(seed, operations, scripts()).await {
            Err(error) if NOT_ANSWERED.iter().any(|it| error.contains(it)) => {
                println!("again: {error}")
            }
            outcome => return outcome,
        }
    }
    Err(format!("seed {seed}: Redis does not answer in time"))
}

/// What errors of a store that does not answer say.
const NOT_ANSWERED: [&str; 2] = ["the store cannot be reached", "more to do than it can"];

/// How many operations lie between two times for which ended calls are remembered.
const HISTORY_EVERY: usize = 2_000;

async fn compare_once(seed: u64, operations: usize, scripts: Scripts) -> Result<(), String> {
    let mut dice = Dice(seed);
    let mut pair = Pair::new(scripts).await;
    let mut story = Vec::new();
    for number in 0..operations {
        let stepped = match number % HISTORY_EVERY {
            number if number + 1 == HISTORY_EVERY => {
                pair.wait_for_history(&mut dice).await.map(|()| "wait for the history".into())
            }
            _ => pair.step(&mut dice).await,
        };
        let agreed = match stepped.and_then(|told| pair.events_agree().map(|()| told)) {
            Ok(told) => {
                story.push(told);
                match number % 15 {
                    0 => match pair.calls_agree().await.and_then(|()| pair.keys_agree()) {
                        Ok(()) => pair.views_agree().await,
                        Err(error) => Err(error),
                    },
                    number if number % 3 == 0 => pair.views_agree().await,
                    _ => Ok(()),
                }
            }
            Err(error) => Err(error),
        };
        if let Err(error) = agreed {
            let tail = story[story.len().saturating_sub(12)..].join("\n  ");
            pair.store.close().await;
            return Err(format!("seed {seed}, operation {number}: {error}\nafter\n  {tail}"));
        }
    }
    pair.store.close().await;
    Ok(())
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().map_or(default, |text| text.parse().expect("a number"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_scripts_and_the_model_agree_on_everything() {
    let (seed, operations) =
        (number("DIFFERENTIAL_SEED", unix_millis()), number("DIFFERENTIAL_OPS", 20_000));
    println!("DIFFERENTIAL_SEED={seed} DIFFERENTIAL_OPS={operations}");
    let pairs = 4;
    let compared = (0..pairs).map(|number| {
        tokio::spawn(compare(seed + number, (operations / pairs) as usize, Scripts::default))
    });
    for pair in compared.collect::<Vec<_>>() {
        pair.await.unwrap().unwrap_or_else(|error| panic!("{error}"));
    }
}
