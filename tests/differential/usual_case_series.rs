//! A fixed series of the usual case in the re-registration window, which random operations reach
//! rarely: the usual case needs a store without reservations, and the window ends early in a run.

use fleet::{Allocate, PodFacts, Release, Renew, names::CallSid};
use store::{Functions, Store};
use testkit::{
    operations::{LEASE_TTL, Operation, table},
    redis::{WRITER, ready_pod},
};

use super::compare::{Pair, Schema};

/// The default chain of this table is one pool.
const ONE_POOL: usize = 5;

impl Pair {
    async fn same(&mut self, operation: Operation) -> Result<(), String> {
        let same = match self.run(&operation).await {
            Ok(()) => self.events_agree(),
            error => error,
        };
        same.map_err(|error| format!("after {operation:?}: {error}"))
    }

    /// A renewal that comes after the end of its call registers the call again only if it is
    /// unknown.
    async fn renew_an_ended_call(&mut self) -> Result<(), String> {
        self.same(Operation::Tiers { tiers: table(ONE_POOL), expected: None }).await?;
        let facts = PodFacts { pin: Some("gold".parse().unwrap()), ..ready_pod() };
        let written = self.store.observe_pod(&"p-0".parse().unwrap(), &facts, WRITER).await;
        written.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
        let written = self.fleet.observe_pod(&"p-0".parse().unwrap(), &facts, WRITER, self.now);
        written.map_err(|error| error.to_string())?;
        self.events_agree()?;
        let ended: CallSid = "ended".parse().unwrap();
        self.same(Operation::Allocate(Allocate::new(ended.clone(), None, LEASE_TTL))).await?;
        self.same(Operation::Release(Release::new(ended.clone(), None))).await?;
        for call in [ended, "unknown".parse().unwrap()] {
            let (calls, pod) = (vec![call.clone()], "p-0".parse().ok());
            self.same(Operation::Renew(Renew { calls, pod, lease_ttl: LEASE_TTL })).await?;
            self.same(Operation::Release(Release::new(call, None))).await?;
        }
        Ok(())
    }
}

pub(super) async fn compare_usual_case(functions: impl Fn() -> Functions) -> Result<(), String> {
    Pair::new(functions(), Schema::Two).await.renew_an_ended_call().await
}

#[tokio::test]
async fn a_renewal_after_the_usual_end_is_the_same_in_both_stores() {
    compare_usual_case(Functions::default).await.unwrap();
}
