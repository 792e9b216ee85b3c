//! What follows from the facts: the views of each pool, and the one place that
//! writes them.

use std::collections::BTreeMap;

use super::{Fleet, Pod};
use crate::{
    names::{PodName, Pool},
    tiers::Kind,
};

/// How a pool counts one of its pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spot {
    /// In the available view, with its live calls as the score.
    Open,
    /// In service, but not in the view: an exclusive pod with a call, or any
    /// pod of a tier that is no more.
    Taken,
    Leaving,
    Unready,
    Quarantined,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Placed {
    pub(super) pool: Pool,
    spot: Spot,
    pub(super) calls: usize,
    /// Orders pods of one score by how long they have been waiting.
    turn: u64,
}

/// The views of one pool.
#[derive(Debug, Default)]
pub(super) struct PoolView {
    /// Pods that may be drawn, by live calls, then by who has waited longest.
    pub(super) open: BTreeMap<(usize, u64), PodName>,
    pub(super) assigned: usize,
    pub(super) leaving: usize,
    pub(super) unready: usize,
    pub(super) quarantined: usize,
    pub(super) calls: usize,
}

impl PoolView {
    fn count(&mut self, placed: &Placed, name: &PodName) {
        self.assigned += 1;
        self.calls += placed.calls;
        match placed.spot {
            Spot::Open => drop(self.open.insert((placed.calls, placed.turn), name.clone())),
            Spot::Taken => {}
            Spot::Leaving => self.leaving += 1,
            Spot::Unready => self.unready += 1,
            Spot::Quarantined => self.quarantined += 1,
        }
    }

    pub(super) fn discount(&mut self, placed: &Placed) {
        self.assigned -= 1;
        self.calls -= placed.calls;
        match placed.spot {
            Spot::Open => drop(self.open.remove(&(placed.calls, placed.turn))),
            Spot::Taken => {}
            Spot::Leaving => self.leaving -= 1,
            Spot::Unready => self.unready -= 1,
            Spot::Quarantined => self.quarantined -= 1,
        }
    }

    pub(super) fn in_service(&self) -> usize {
        self.assigned - self.leaving - self.unready - self.quarantined
    }
}

impl Pod {
    /// Takes no new calls until it is gone or undrained.
    pub(super) fn is_leaving(&self) -> bool {
        self.draining_until.is_some() || self.facts.terminating
    }

    /// Takes calls, as far as it has room.
    pub(super) fn is_serving(&self) -> bool {
        self.facts.ready && !self.is_leaving() && self.quarantined_until.is_none()
    }

    fn spot(&self, kind: Option<Kind>) -> Spot {
        match kind {
            _ if self.is_leaving() => Spot::Leaving,
            _ if !self.facts.ready => Spot::Unready,
            _ if self.quarantined_until.is_some() => Spot::Quarantined,
            Some(Kind::Shared { .. }) => Spot::Open,
            Some(Kind::Exclusive | Kind::Dedicated) if self.calls.is_empty() => Spot::Open,
            _ => Spot::Taken,
        }
    }
}

impl Fleet {
    /// Brings the views of a pod in line with its facts. Answers whether they
    /// were out of line.
    pub(super) fn place(&mut self, name: &PodName) -> bool {
        let Some(pod) = self.pods.get_mut(name) else {
            return false;
        };
        let should_be = pod.tier.as_ref().map(|tier| {
            let spot = pod.spot(self.tiers.kind(tier));
            (tier, spot, pod.calls.len())
        });
        let is = pod.placed.as_ref().map(|placed| (&placed.pool, placed.spot, placed.calls));
        if should_be == is {
            return false;
        }
        if let Some(before) = pod.placed.take()
            && let Some(view) = self.pools.get_mut(&before.pool)
        {
            view.discount(&before);
        }
        if pod.is_leaving() && pod.calls.is_empty() {
            self.drained.push(name.clone());
        }
        if let Some((pool, spot, calls)) = should_be {
            self.turn += 1;
            let placed = Placed { pool: pool.clone(), spot, calls, turn: self.turn };
            if !self.pools.contains_key(pool) {
                self.pools.insert(pool.clone(), PoolView::default());
            }
            let view = self.pools.get_mut(pool).expect("just made");
            view.count(&placed, name);
            pod.placed = Some(placed);
        }
        true
    }
}
