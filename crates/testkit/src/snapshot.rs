//! All keys of a store as they are at one moment: one script reads them, so that no lease ends
//! and no other command runs between two keys.

use std::collections::BTreeMap;

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
    /// How long it lives (ms); below zero if it lives for ever.
    left: i64,
    values: Vec<String>,
}

pub struct Snapshot(BTreeMap<String, Key>);

impl Snapshot {
    /// Reads all keys that begin so.
    pub fn read(redis: &mut redis::Connection, prefix: &str) -> Result<Self, String> {
        type Entry = (String, String, i64, Vec<String>);
        let read: redis::RedisResult<Vec<Entry>> =
            redis::cmd("EVAL").arg(READ_ALL).arg(0).arg(prefix).query(redis);
        let read = read.map_err(|error| error.to_string())?;
        let entry = |(key, kind, left, values)| (key, Key { kind, left, values });
        Ok(Self(read.into_iter().map(entry).collect()))
    }

    /// The values of a key; none where there is no such key.
    fn values(&self, key: &str, kind: &str) -> Result<&[String], String> {
        match self.0.get(key) {
            None => Ok(&[]),
            Some(found) if found.kind == kind => Ok(&found.values),
            Some(found) => Err(format!("{key} is a {}, not a {kind}", found.kind)),
        }
    }

    #[allow(dead_code, reason = "the faults under load need it")]
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

    /// The members of a sorted set, with their scores.
    pub fn scores(&self, key: &str) -> Result<BTreeMap<String, f64>, String> {
        let number = |(member, score): (String, String)| match score.parse() {
            Ok(score) => Ok((member, score)),
            Err(_) => Err(format!("{member} has the score {score} in {key}")),
        };
        pairs(self.values(key, "zset")?).map(number).collect()
    }

    /// How long a key lives (ms), where it has an end.
    #[allow(dead_code, reason = "the faults under load do not need it")]
    pub fn left(&self, key: &str) -> Option<u64> {
        self.0.get(key).and_then(|found| u64::try_from(found.left).ok())
    }
}

fn pairs(values: &[String]) -> impl Iterator<Item = (String, String)> {
    values.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone()))
}
