//! An atomic snapshot of a store's keys: one script reads them, so that no lease ends and no
//! other command runs in between.

use std::collections::BTreeMap;

use fleet::{
    names::Pool,
    outbound::DialSums,
    testing::invariants::{
        OutboundState, PodState, PoolState, ReservationState, State, StreamState,
    },
    tiers::{TierKind, Tiers},
};

const READ_ALL: &str = r"
    local readers = {
        string = function(key) return {redis.call('GET', key)} end,
        hash = function(key) return redis.call('HGETALL', key) end,
        set = function(key) return redis.call('SMEMBERS', key) end,
        zset = function(key) return redis.call('ZRANGE', key, 0, -1, 'WITHSCORES') end,
    }
    local all = {}
    for _, key in ipairs(redis.call('KEYS', ARGV[1] .. '*')) do
        local kind = redis.call('TYPE', key).ok
        local read = readers[kind]
        all[#all + 1] = {key, kind, redis.call('PTTL', key), read and read(key) or {}}
    end
    return all";

struct Key {
    kind: String,
    /// Remaining time to live (ms); negative for a key without expiry.
    ttl: i64,
    values: Vec<String>,
}

pub struct Snapshot(BTreeMap<String, Key>);

impl Snapshot {
    /// Reads all keys with a prefix.
    pub fn read(redis: &mut redis::Connection, prefix: &str) -> Result<Self, String> {
        type Entry = (String, String, i64, Vec<String>);
        let read: redis::RedisResult<Vec<Entry>> =
            redis::cmd("EVAL").arg(READ_ALL).arg(0).arg(prefix).query(redis);
        let read = read.map_err(|error| error.to_string())?;
        let entry = |(key, kind, ttl, values)| (key, Key { kind, ttl, values });
        Ok(Self(read.into_iter().map(entry).collect()))
    }

    /// The values of a key; empty for a missing key.
    fn values(&self, key: &str, kind: &str) -> Result<&[String], String> {
        match self.0.get(key) {
            None => Ok(&[]),
            Some(found) if found.kind == kind => Ok(&found.values),
            Some(found) => Err(format!("{key} is a {}, not a {kind}", found.kind)),
        }
    }

    /// The names of the keys with a prefix.
    pub fn names(&self, prefix: &str) -> Vec<String> {
        self.0.keys().filter(|key| key.starts_with(prefix)).cloned().collect()
    }

    pub fn exists(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    pub fn string(&self, key: &str) -> Result<Option<String>, String> {
        Ok(self.values(key, "string")?.first().cloned())
    }

    /// The members of a set, sorted.
    pub fn set(&self, key: &str) -> Result<Vec<String>, String> {
        let mut members = self.values(key, "set")?.to_vec();
        members.sort();
        Ok(members)
    }

    pub fn hash(&self, key: &str) -> Result<BTreeMap<String, String>, String> {
        Ok(pairs(self.values(key, "hash")?).collect())
    }

    /// The members of a sorted set with their scores.
    pub fn scores(&self, key: &str) -> Result<BTreeMap<String, f64>, String> {
        let number = |(member, score): (String, String)| match score.parse() {
            Ok(score) => Ok((member, score)),
            Err(_) => Err(format!("{member} has the score {score} in {key}")),
        };
        pairs(self.values(key, "zset")?).map(number).collect()
    }

    /// Pods, pools and calls from the documented keys (docs/redis.md).
    pub fn state(&self, prefix: &str, tiers: &Tiers) -> Result<State, String> {
        let mut state = State::default();
        for pool in self.set(&format!("{prefix}pools"))? {
            let pool: Pool = pool.parse().map_err(|error| format!("{pool}: {error}"))?;
            state.pools.insert(pool.to_string(), self.pool_state(prefix, &pool, tiers)?);
        }
        let start = format!("{prefix}pod:");
        let pods = self.0.keys().filter_map(|key| key.strip_prefix(&start));
        for pod in pods.filter(|name| !name.contains(':') && *name != "metadata") {
            state.pods.insert(pod.to_owned(), self.pod_state(prefix, pod)?);
        }
        for call in self.scores(&format!("{prefix}calls"))?.into_keys() {
            let mut record = self.hash(&format!("{prefix}call:{call}"))?;
            let pod = record.remove("pod_name").unwrap_or_default();
            let stream = record.remove("stream").map(|stream| stream_state(&stream));
            state.streams.extend(stream.map(|stream| (call.clone(), stream)));
            state.calls.insert(call, pod);
        }
        for gateway in self.hash(&format!("{prefix}gateways"))?.into_keys() {
            let calls = self.scores(&format!("{prefix}gateway:{gateway}"))?.into_iter();
            let calls = calls.map(|(call, score)| (call, score == 1.0)).collect();
            state.gateways.insert(gateway, calls);
        }
        state.outbound = self.outbound_state(prefix)?;
        Ok(state)
    }

    /// Reservations, lines and sums of dials.
    fn outbound_state(&self, prefix: &str) -> Result<OutboundState, String> {
        let mut state = OutboundState::default();
        for id in self.scores(&format!("{prefix}reservations"))?.into_keys() {
            let text = self.string(&format!("{prefix}reservation:{id}"))?.unwrap_or_default();
            let words: Vec<&str> = text.split(' ').collect();
            let [_, _, probability, tier, _, number, _, _] = words[..] else {
                return Err(format!("{id} has the malformed record {text:?}"));
            };
            let pool: Pool = tier.parse().map_err(|error| format!("{id}: {error}"))?;
            let number = Some(number.to_owned()).filter(|number| number != "-");
            let probability = probability.parse().map_err(|error| format!("{id}: {error}"))?;
            let shown = ReservationState { pool: pool.to_string(), number, probability };
            state.reservations.insert(id, shown);
        }
        let live = self.scores(&format!("{prefix}calls"))?.into_keys();
        for call in live.chain(self.scores(&format!("{prefix}waiting"))?.into_keys()) {
            let mut record = self.hash(&format!("{prefix}call:{call}"))?;
            let number = record.remove("number").filter(|number| !number.is_empty());
            state.call_numbers.extend(number.map(|number| (call, number)));
        }
        for number in self.names(&format!("{prefix}lines:")) {
            let holders = self.set(&number)?.into_iter().collect();
            let number = number.split_once("lines:").map_or("", |(_, number)| number);
            state.lines.insert(number.to_owned(), holders);
        }
        for (tier, text) in self.hash(&format!("{prefix}dials"))? {
            let Ok(pool) = tier.parse::<Pool>() else { continue };
            let numbers: Vec<u64> = text.split(' ').filter_map(|word| word.parse().ok()).collect();
            let [_, dials, probability, variance] = numbers[..] else {
                return Err(format!("{tier} has the malformed dials {text:?}"));
            };
            state.sums.insert(pool.to_string(), DialSums { dials, probability, variance });
        }
        Ok(state)
    }

    fn pool_state(&self, prefix: &str, pool: &Pool, tiers: &Tiers) -> Result<PoolState, String> {
        let (stem, view) = match pool {
            Pool::Tier(tier) => (format!("{prefix}pool:{tier}"), "available"),
            Pool::Merchant(id) => (format!("{prefix}merchant:{id}"), "pods"),
        };
        let (kind, view) = (tiers.kind(pool), format!("{stem}:{view}"));
        let available = match kind {
            Some(TierKind::Shared { .. }) => self.scores(&view)?,
            _ => self.set(&view)?.into_iter().map(|pod| (pod, 0.0)).collect(),
        };
        let at_risk = self.scores(&format!("{stem}:at_risk"))?;
        let available = available.into_iter().chain(at_risk);
        let available = available.map(|(pod, calls)| (pod, calls as usize)).collect();
        let out = self.scores(&format!("{stem}:out"))?.into_keys();
        let assigned = self.set(&format!("{stem}:assigned"))?.into_iter().chain(out).collect();
        Ok(PoolState { kind, assigned, available })
    }

    fn pod_state(&self, prefix: &str, pod: &str) -> Result<PodState, String> {
        let fields = self.hash(&format!("{prefix}pod:{pod}"))?;
        let is = |field: &str, value: &str| fields.get(field).map_or("", String::as_str) == value;
        let is_draining = self.exists(&format!("{prefix}pod:draining:{pod}"));
        let is_serving = is("ready", "1")
            && !is("terminating", "1")
            && !is_draining
            && is("quarantined_until", "");
        let calls = self.scores(&format!("{prefix}pod:calls:{pod}"))?.into_keys().collect();
        Ok(PodState { is_serving, calls })
    }

    /// The remaining time to live of a key (ms), if it expires.
    pub fn ttl(&self, key: &str) -> Option<u64> {
        self.0.get(key).and_then(|found| u64::try_from(found.ttl).ok())
    }
}

/// The stream of a call record: gateway, stream, start, and the cause of a release.
fn stream_state(text: &str) -> StreamState {
    let mut parts = text.split(' ');
    let gateway = parts.next().unwrap_or_default().to_owned();
    StreamState { gateway, is_ending: parts.nth(2).is_some_and(|cause| !cause.is_empty()) }
}

fn pairs(values: &[String]) -> impl Iterator<Item = (String, String)> {
    values.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone()))
}
