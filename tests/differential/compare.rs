//! One model, two stores: random operations on a real Redis and on the fleet;
//! every answer and every view must agree.

use std::{collections::HashMap, sync::Arc, time::Duration};

use fleet::{
    Allocation, CallQuery, Cause, Confirm, Departure, Edit, Event, EventKind, Fleet, Found,
    PodFacts, PodStatus, PodWriter, Refusal, Release, Removed, Renew,
    merchant::Malformed,
    names::{CallSid, PodName, Pool},
};
use store::{Redis, RedisConfig, Scripts, Store, Ttls};

use testkit::{
    dice::Dice,
    operations::{CONNECT, LEASE, MERCHANTS, PINS, TABLES, TRUST, table},
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

macro_rules! same {
    ($what:expr, $redis:expr, $fleet:expr) => {{
        let (redis, fleet) = (&$redis, &$fleet);
        if redis != fleet {
            return Err(format!("{}: Redis says {redis:?}, the fleet {fleet:?}", $what));
        }
    }};
}

pub(crate) struct World {
    pub(crate) server: RedisServer,
    pub(crate) store: Arc<Redis>,
    pub(crate) fleet: Fleet,
    pub(crate) plain: redis::Connection,
    pub(crate) now: u64,
    pub(crate) unswept: u32,
    /// Up to which event we have looked.
    pub(crate) seen: String,
}

impl World {
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
        let mut world = Self { server, store, fleet, plain, now, unswept: 0, seen: "-".into() };
        // (that the tiers are in force, which the fleet began with)
        world.told().unwrap();
        world
    }

    async fn step(&mut self, dice: &mut Dice) -> Result<String, String> {
        let now = self.now;
        let (store, fleet) = (self.store.clone(), &mut self.fleet);
        let down = |error: store::StoreError| format!("the store failed: {error}");
        let told = match dice.roll(51) {
            0..=13 => {
                let request = dice.allocate(fleet);
                let outcome = store.allocate(&request).await.map_err(down)?;
                let chosen = outcome.iter().map(|got| (request.call.clone(), got.pod.clone()));
                fleet.favour(chosen.collect());
                let ours = fleet.allocate(&request, now);
                same!(format!("{request:?}"), plain(outcome), plain(ours));
                format!("{request:?}")
            }
            14..=20 => {
                let pod = dice.pod();
                let (call, attempt) = (dice.call(), dice.roll(3) as u32);
                let request = Release {
                    call,
                    pod: dice.sometimes(pod),
                    attempt: (dice.roll(4) == 0).then_some(attempt),
                    cause: [Cause::Agent, Cause::Provider, Cause::Operator, Cause::Stream]
                        [dice.roll(4)],
                };
                same!(
                    format!("{request:?}"),
                    store.release(&request).await.map_err(down)?,
                    fleet.release(&request, now)
                );
                format!("{request:?}")
            }
            21..=23 => {
                let calls = (0..=dice.roll(3)).map(|_| dice.call()).collect();
                let pod = (dice.roll(2) == 0).then(|| dice.pod());
                let request = Renew { calls, pod, lease_ttl: LEASE };
                same!(
                    format!("{request:?}"),
                    store.renew(&request).await.map_err(down)?,
                    fleet.renew(&request, now)
                );
                format!("{request:?}")
            }
            24..=25 => {
                let (pod, ttl) = (dice.pod(), 1 + dice.roll(15_000) as u64);
                same!(
                    "drain",
                    store.drain(&pod, ttl).await.map_err(down)?,
                    fleet.drain(&pod, ttl, now)
                );
                format!("drain {pod} for {ttl}")
            }
            26..=27 => {
                let pod = dice.pod();
                same!("undrain", store.undrain(&pod).await.map_err(down)?, fleet.undrain(&pod));
                format!("undrain {pod}")
            }
            28..=34 => {
                let pod = dice.pod();
                let facts = PodFacts {
                    uid: format!("u{}", dice.roll(8) / 7),
                    address: "a:1".into(),
                    ready: dice.roll(5) > 0,
                    terminating: dice.roll(10) == 0,
                    restarts: (dice.roll(10) / 9) as u32,
                    pin: PINS[dice.roll(PINS.len())].map(|pin| pin.parse().unwrap()),
                };
                let (origin, epoch) = dice.writer(fleet, now);
                let writer = PodWriter { origin: &origin, epoch };
                let mut redis = store.observe_pod(&pod, &facts, writer).await.map_err(down)?;
                fleet.favour(chosen(&store).await?);
                let mut ours = fleet.observe_pod(&pod, &facts, writer, now);
                for ended in [&mut redis, &mut ours].into_iter().flatten() {
                    ended.ended.sort_by(|a, b| a.call.cmp(&b.call));
                }
                same!(format!("observe {pod} {facts:?} {writer:?}"), redis, ours);
                format!("observe {pod} {facts:?} {writer:?}")
            }
            35 => {
                let (pod, uid) = (dice.pod(), format!("u{}", dice.roll(2)));
                let departure = [Departure::Now, Departure::WhenIdle][dice.roll(2)];
                let (origin, epoch) = dice.writer(fleet, now);
                let writer = PodWriter { origin: &origin, epoch };
                let mut redis =
                    store.remove_pod(&pod, &uid, departure, writer).await.map_err(down)?;
                fleet.favour(chosen(&store).await?);
                let mut ours = fleet.remove_pod(&pod, &uid, departure, writer, now);
                for removed in [&mut redis, &mut ours] {
                    if let Ok(Removed::Gone { ended }) = removed {
                        ended.sort_by(|a, b| a.call.cmp(&b.call));
                    }
                }
                same!(format!("remove {pod} {uid} {departure:?}"), redis, ours);
                format!("remove {pod} {uid} {departure:?}")
            }
            36 => {
                let (pod, uid) = (dice.pod(), format!("u{}", dice.roll(2)));
                let to: Pool =
                    ["gold", "basic", "merchant:acme", "loose"][dice.roll(4)].parse().unwrap();
                let (origin, epoch) = dice.writer(fleet, now);
                let writer = PodWriter { origin: &origin, epoch };
                same!(
                    "move",
                    store.move_pod(&pod, &uid, &to, writer).await.map_err(down)?,
                    fleet.move_pod(&pod, &uid, &to, writer)
                );
                format!("move {pod} {uid} to {to}")
            }
            37 => {
                let tiers = table(dice.roll(TABLES.len()));
                let known = table(dice.roll(TABLES.len()));
                let is_careful = dice.roll(2) == 0;
                let edit =
                    || Edit { instead_of: is_careful.then_some(&known), by: "admin (token 2)" };
                same!(
                    "tiers",
                    store.apply_tiers(&tiers, edit()).await.map_err(down)?,
                    fleet.apply_tiers(&tiers, edit())
                );
                format!("tiers {}", serde_json::Value::from(tiers))
            }
            38 => {
                let (id, document) = (dice.merchant(), MERCHANTS[dice.roll(MERCHANTS.len())]);
                let known = MERCHANTS[dice.roll(MERCHANTS.len())].unwrap_or_default();
                let is_careful = dice.roll(2) == 0;
                let edit =
                    || Edit { instead_of: is_careful.then_some(known), by: "admin (token 2)" };
                same!(
                    "merchant",
                    store.set_merchant(&id, document, edit()).await.map_err(down)?,
                    fleet.set_merchant(&id, document, edit())
                );
                format!("merchant {id} {document:?}")
            }
            39..=40 => {
                let most = 1 + dice.roll(3);
                same!("sweep", store.sweep(most).await.map_err(down)?, fleet.sweep(most, now));
                format!("sweep {most}")
            }
            41 => {
                let mut names = fleet.pod_names();
                names.sort();
                same!("audit", store.audit().await.map_err(down)?, fleet.audit(&names));
                "audit".into()
            }
            43..=45 => {
                let (call, attempt) = (dice.call(), dice.roll(3) as u32);
                let attempt = dice.sometimes(attempt);
                let confirm = Confirm { call, pod: dice.pod(), attempt, lease_ttl: LEASE };
                same!(
                    format!("{confirm:?}"),
                    store.confirm(&confirm).await.map_err(down)?,
                    fleet.confirm(&confirm, now)
                );
                format!("{confirm:?}")
            }
            46 => {
                store.spare(CONNECT).await.map_err(down)?;
                fleet.spare(CONNECT, now);
                "spare".into()
            }
            42 => {
                let claim = dice.claim(fleet, now);
                same!(
                    format!("{claim:?}"),
                    store.claim_pods(&claim).await.map_err(down)?,
                    fleet.claim_pods(&claim, now)
                );
                format!("{claim:?}")
            }
            _ => return self.wait(dice).await,
        };
        Ok(told)
    }

    /// Moves time; not so far without a sweep that TTLs would tidy up first.
    async fn wait(&mut self, dice: &mut Dice) -> Result<String, String> {
        let ms = 1 + dice.roll(2_000) as u64;
        self.now += ms;
        self.server.set_time(self.now);
        self.unswept += 1;
        if self.unswept.is_multiple_of(8) {
            let swept = self.store.sweep(100).await.map_err(|error| error.to_string())?;
            same!("the great sweep", swept, self.fleet.sweep(100, self.now));
        }
        Ok(format!("wait {ms}"))
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

async fn compare_once(seed: u64, operations: usize, scripts: Scripts) -> Result<(), String> {
    let mut dice = Dice(seed);
    let mut world = World::new(scripts).await;
    let mut story = Vec::new();
    for number in 0..operations {
        let stepped = world.step(&mut dice).await;
        let agreed = match stepped.and_then(|told| world.events_agree().map(|()| told)) {
            Ok(told) => {
                story.push(told);
                match number % 15 {
                    0 => match world.calls_agree().await.and_then(|()| world.keys_agree()) {
                        Ok(()) => world.views_agree().await,
                        Err(error) => Err(error),
                    },
                    number if number % 3 == 0 => world.views_agree().await,
                    _ => Ok(()),
                }
            }
            Err(error) => Err(error),
        };
        if let Err(error) = agreed {
            let tail = story[story.len().saturating_sub(12)..].join("\n  ");
            world.store.close().await;
            return Err(format!("seed {seed}, operation {number}: {error}\nafter\n  {tail}"));
        }
    }
    world.store.close().await;
    Ok(())
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().map_or(default, |text| text.parse().expect("a number"))
}

#[tokio::test]
async fn the_scripts_and_the_model_agree_on_everything() {
    let (seed, operations) =
        (number("DIFFERENTIAL_SEED", unix_millis()), number("DIFFERENTIAL_OPS", 20_000));
    println!("DIFFERENTIAL_SEED={seed} DIFFERENTIAL_OPS={operations}");
    let worlds = 4;
    for world in 0..worlds {
        let outcome = compare(seed + world, (operations / worlds) as usize, Scripts::default).await;
        outcome.unwrap_or_else(|error| panic!("{error}"));
    }
}
