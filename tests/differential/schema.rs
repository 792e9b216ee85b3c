//! Faults of the layout during a run: records with the field names of the other schema, and changes
//! of the schema.

use std::time::Duration;

use crate::compare::{Pair, Schema};

/// Names of the renamed fields of a call record in schemas 1 and 2.
const NAMES: [[&str; 2]; 2] = [["attempt", "attempts"], ["request_ids", "pod_attempt"]];

/// Renames the fields of a record in one step: from ARGV[1] to ARGV[2], from ARGV[3] to ARGV[4].
const RENAME: &str = "for i = 1, 3, 2 do \
    local value = redis.call('HGET', KEYS[1], ARGV[i]) \
    if value then redis.call('HSET', KEYS[1], ARGV[i + 1], value) \
    redis.call('HDEL', KEYS[1], ARGV[i]) end end";

impl Pair {
    /// Names of the renamed fields in the schema of the store, and in the other one.
    pub(super) fn field_names(&self) -> [[&'static str; 2]; 2] {
        if self.schema == Schema::One { NAMES } else { [NAMES[1], NAMES[0]] }
    }

    /// Gives records the names of the other schema in every second interval, and all of them their
    /// own names after it.
    pub(super) fn mix_records(&mut self, number: usize, interval: usize) {
        let [own, other] = self.field_names();
        let is_mixed = number / interval % 2 == 1;
        if is_mixed && number.is_multiple_of(3) {
            self.rename(number / 3 % 14, own, other);
        } else if !is_mixed && self.has_mixed_records {
            (0..14).for_each(|call| self.rename(call, other, own));
        }
        self.has_mixed_records = is_mixed;
    }

    fn rename(&mut self, call: usize, from: [&str; 2], to: [&str; 2]) {
        let mut rename = redis::cmd("EVAL");
        rename.arg(RENAME).arg(1).arg(format!("voice:call:c{call}"));
        rename.arg(&[from[0], to[0], from[1], to[1]]).exec(&mut self.plain).unwrap();
    }

    /// Sets the schema of the store to 1, or lets the store migrate to 2.
    pub(super) async fn change_schema(&mut self) {
        if self.read_schema() == "2" {
            let mut pipe = redis::pipe();
            pipe.atomic().set("voice:migration", "held").set("voice:schema", 1);
            return pipe.exec(&mut self.plain).unwrap();
        }
        // The last use by a previous version is long ago: the clock stands still meanwhile.
        redis::cmd("SET").arg("voice:migration").arg(1).exec(&mut self.plain).unwrap();
        for _ in 0..1_000 {
            if self.read_schema() == "2" {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the store is not migrated");
    }

    fn read_schema(&mut self) -> String {
        redis::cmd("GET").arg("voice:schema").query(&mut self.plain).unwrap()
    }
}
