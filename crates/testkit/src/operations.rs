//! What may happen to a fleet, by the roll of a die.

use super::dice::Dice;
use fleet::{
    After, Allocate, Claim, Claimant, Fleet, Hold, PodOrigin, Signed,
    names::{CallSid, MerchantId, PodName},
    tiers::{Origin, Tiers},
};

pub const LEASE: u64 = 10_000;
pub const CONNECT: u64 = 3_000;
/// For so long the store believes pods about calls: a good part of a run.
pub const TRUST: u64 = 300_000;

pub const TABLES: [&str; 5] = [
    r#"{"tiers": {"gold": {"target": 2}, "basic": {"type": "shared", "target": 2, "max_concurrent": 3},
        "acme": {"target": 1}}, "default_chain": ["gold", "basic"]}"#,
    r#"{"tiers": {"gold": {"type": "shared", "target": 2, "max_concurrent": 2, "strategy": "pack"},
        "basic": {"target": 2}}, "default_chain": ["basic", "gold"]}"#,
    r#"{"basic": {"type": "shared", "target": 9, "max_concurrent": 1}}"#,
    r#"{"gold": 1, "silver": 1, "basic": 1}"#,
    r#"{"tiers": {"gold": {"target": 1}, "basic": {"target": 3},
        "loose": {"type": "shared", "target": 1}}, "default_chain": ["gold"]}"#,
];

pub const MERCHANTS: [Option<&str>; 24] = [
    None,
    Some(r#"{"pool": "acme"}"#),
    Some(r#"{"pool": "acme", "dedicated_only": true}"#),
    Some(r#"{"fallback": ["nowhere", "merchant:m1", "basic", "loose"]}"#),
    Some(r#"{"fallback": ["acme", "gold"], "tier": 7, "pool": ""}"#),
    Some(r#"{"pool": "acme", "fallback": [], "dedicated_only": null}"#),
    Some("not a document"),
    Some(r#"{"fallback": "gold"}"#),
    Some(r#"{"fallback": {}}"#),
    Some(r#"{"fallback": ["a b"]}"#),
    Some(r#"{"pool": 7}"#),
    Some(r#"[]"#),
    Some(r#"{"pool": "acme", "max_calls": 2}"#),
    Some(r#"{"max_calls": 1, "max_rate": 5}"#),
    Some(r#"{"max_rate": 1}"#),
    Some(r#"{"max_rate": 2.0, "max_calls": 3}"#),
    Some(r#"{"max_rate": 0}"#),
    Some(r#"{"max_calls": 1.5}"#),
    Some(r#"{"pool": "acme", "priority": NaN}"#),
    Some(r#"{"pool": "acme", "priority": 0x10}"#),
    Some(r#"{"priority": 5}"#),
    Some(r#"{"priority": -3.0, "max_calls": 4}"#),
    Some(r#"{"priority": 101}"#),
    Some(r#"{"priority": "1"}"#),
];

pub const PINS: [Option<&str>; 5] =
    [None, None, Some("basic"), Some("merchant:m1"), Some("nowhere")];

impl Dice {
    pub fn pod(&mut self) -> PodName {
        format!("p{}", self.roll(7)).parse().unwrap()
    }

    pub fn call(&mut self) -> CallSid {
        format!("c{}", self.roll(14)).parse().unwrap()
    }

    pub fn merchant(&mut self) -> MerchantId {
        format!("m{}", self.roll(3)).parse().unwrap()
    }

    fn origin(&mut self) -> PodOrigin {
        let namespace = "ns".into();
        [PodOrigin::Simulated, PodOrigin::List, PodOrigin::Kubernetes { namespace }][self.roll(3)]
            .clone()
    }

    /// A writer of pods: mostly the one in office, else one of another origin or epoch.
    pub fn writer(&mut self, fleet: &mut Fleet, now: u64) -> (PodOrigin, u64) {
        let is_owner = self.roll(12) > 0;
        loop {
            let origin = self.origin();
            let by = Claimant::Leader { epoch: None };
            let ask = Claim { origin: origin.clone(), by, force: false };
            match fleet.claim_pods(&ask, now) {
                Ok(epoch) if self.roll(12) == 0 => return (origin, (epoch + 1).saturating_sub(2)),
                Ok(epoch) => return (origin, epoch + (self.roll(12) / 11) as u64),
                Err(_) if is_owner => {}
                Err(_) => return (origin, self.roll(3) as u64),
            }
        }
    }

    pub fn claim(&mut self, fleet: &mut Fleet, now: u64) -> Claim {
        let (origin, epoch) = self.writer(fleet, now);
        let by = match self.roll(3) {
            0 => Claimant::Leader { epoch: self.sometimes(epoch) },
            _ => Claimant::List { digest: format!("d{}", self.roll(3)), is_new: self.roll(3) == 0 },
        };
        let origin = if self.roll(8) == 0 { self.origin() } else { origin };
        Claim { origin, by, force: self.roll(4) == 0 }
    }

    pub fn allocate(&mut self, fleet: &Fleet) -> Allocate {
        let (call, merchant, provisional) = (self.call(), self.merchant(), self.roll(3) == 0);
        let hold = Hold {
            time: 500 + self.roll(8_000) as u64,
            patience: 1_000 + self.roll(3_000) as u64,
            most: 3 + self.roll(3),
            most_per_merchant: 1 + self.roll(2),
        };
        // Mostly what a provider would say of the attempt that is over.
        let live = fleet.call(&call);
        let (pod, attempt) = match live.filter(|_| self.roll(4) > 0) {
            Some(live) => (live.pod, live.attempt),
            None => (self.pod(), self.roll(4) as u32),
        };
        let after = After { pod, attempt, is_final: self.roll(2) == 0, retries: 2 };
        let (returns, is_after) = (self.roll(2) == 0, self.roll(4) == 0);
        // Few, so that many are the same, for calls that are not.
        let signed = Signed {
            fingerprint: format!("signed-{:09}", self.roll(12)).parse().unwrap(),
            window: 1_000 + self.roll(20_000) as u64,
        };
        Allocate {
            merchant: self.sometimes(merchant),
            lease_ttl: if provisional { CONNECT } else { LEASE },
            provisional,
            returns: returns || is_after,
            hold: (self.roll(2) == 0).then_some(hold),
            after: is_after.then_some(after),
            signed: (self.roll(4) == 0).then_some(signed),
            call,
        }
    }

    pub fn sometimes<T>(&mut self, value: T) -> Option<T> {
        (self.roll(3) == 0).then_some(value)
    }
}

pub fn table(index: usize) -> Tiers {
    Tiers::parse(TABLES[index], Origin::Settings).unwrap().0
}
