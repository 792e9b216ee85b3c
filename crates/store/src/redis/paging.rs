//! What takes more than one script: everything that is read or done page by page.

use super::keys;
use std::collections::BTreeMap;

use super::{
    Redis,
    client::Timeliness,
    operations::flag,
    reply::{call_row, millis, parse, pod_row},
};
use crate::StoreError;
use fleet::{
    CallCursor, CallPage, CallQuery, Event, EventId, Logged, Millis, PodStatus, PoolStatus,
    names::{MerchantId, Pool},
    tiers::Tiers,
};

/// Calls that are looked at in one step, and steps that one page may take.
const LOOKED_AT: &str = "100";
const STEPS: usize = 20;
/// Pending calls that one step looks at.
const SPARED: &str = "100";

impl Redis {
    /// All pods, page by page. A pod that moves meanwhile may come twice.
    pub(super) async fn all_pods(&self) -> Result<Vec<PodStatus>, StoreError> {
        let mut pods = BTreeMap::new();
        let mut cursor = "0".to_owned();
        loop {
            let mut answer = self.run(&self.scripts.pods, &[&cursor, "40"]).await?;
            cursor = answer.text()?;
            for row in answer.list()? {
                match pod_row(row) {
                    Ok(pod) => drop(pods.insert(pod.name.clone(), pod)),
                    Err(error) => tracing::warn!(%error, "a pod cannot be read"),
                }
            }
            if cursor == "0" {
                return Ok(pods.into_values().collect());
            }
        }
    }

    /// Some calls. Each step looks at a bounded number of them, and there is a bounded number
    /// of steps: where few match, a page may be short, and go on all the same.
    pub(super) async fn some_calls(&self, query: &CallQuery) -> Result<CallPage, StoreError> {
        let pool = query.pool.as_ref().map(Pool::to_string).unwrap_or_default();
        let merchant = query.merchant.as_ref().map_or("", |id| id.as_str());
        let pod = query.pod.as_ref().map_or("", |pod| pod.as_str());
        let mut page = CallPage { calls: Vec::new(), next: query.after.clone() };
        for _ in 0..STEPS {
            let (until, call) = match &page.next {
                Some(CallCursor { until, call }) => (until.to_string(), call.to_string()),
                None => (String::new(), String::new()),
            };
            let waiting = flag(query.waiting);
            let args = [waiting, &pool, merchant, pod, &until, &call, LOOKED_AT];
            let mut answer = self.run(&self.scripts.calls, &args).await?;
            let (until, call) = (answer.text()?, answer.text()?);
            for row in answer.list()? {
                match call_row(row) {
                    Ok(found) => page.calls.push(found),
                    Err(error) => tracing::warn!(%error, "a call cannot be read"),
                }
            }
            if page.calls.len() > query.most {
                page.calls.truncate(query.most);
                page.next = page.calls.last().map(CallCursor::of);
                return Ok(page);
            }
            page.next = if call.is_empty() {
                None
            } else {
                Some(CallCursor { until: millis(&until)?, call: parse(&call)? })
            };
            if page.next.is_none() || page.calls.len() == query.most {
                break;
            }
        }
        Ok(page)
    }

    pub(super) async fn some_merchants(
        &self,
        after: Option<&MerchantId>,
        most: usize,
    ) -> Result<Vec<(MerchantId, String)>, StoreError> {
        let key = self.key(keys::MERCHANT_CONFIG);
        let names: Vec<String> = self.ask_fact(&key, redis::cmd("HKEYS").arg(&key)).await?;
        // What is no name was put there by hand, and is nobody's.
        let mut names: Vec<MerchantId> =
            names.iter().filter_map(|name| name.parse().ok()).collect();
        names.retain(|name| after.is_none_or(|after| name > after));
        names.sort();
        names.truncate(most);
        if names.is_empty() {
            return Ok(Vec::new());
        }
        let mut get = redis::cmd("HMGET");
        get.arg(&key);
        for name in &names {
            get.arg(name.as_str());
        }
        let documents: Vec<Option<String>> = self.ask_fact(&key, &get).await?;
        let both = names.into_iter().zip(documents);
        Ok(both.filter_map(|(name, document)| Some((name, document?))).collect())
    }

    pub(super) async fn events(
        &self,
        command: &str,
        range: [String; 2],
        most: usize,
    ) -> Result<Vec<Logged>, StoreError> {
        let mut command = redis::cmd(command);
        command.arg(self.key(keys::EVENTS)).arg(&range).arg("COUNT").arg(most);
        let entries = self.ask_unless_wrong_type(&command).await?;
        let entries: Vec<(String, Vec<String>)> = entries.unwrap_or_default();
        let read = |(id, fields): (String, Vec<String>)| {
            let event = Event::read(fields.first()?, fields.get(1)?)?;
            let id: EventId = id.parse().ok()?;
            Some(Logged { id, at: id.at, event })
        };
        Ok(entries.into_iter().filter_map(read).collect())
    }

    /// Extends all pending calls, page by page. Every page has the bound that the first one
    /// fixed: a bound that moved with the clock would make extended calls due again.
    pub(super) async fn spare_all(&self, time: Millis) -> Result<(), StoreError> {
        let time = time.to_string();
        for index in ["calls", "waiting"] {
            let (mut bound, mut deadline, mut call) = (String::new(), String::new(), String::new());
            loop {
                let args = [index, &bound, &time, SPARED, &deadline, &call];
                let script = &self.scripts.spare;
                let mut answer = self.link.attempt(script, &args, Timeliness::InTime).await?;
                bound = answer.text()?;
                if answer.flag()? {
                    break;
                }
                (deadline, call) = (answer.text()?, answer.text()?);
            }
        }
        Ok(())
    }

    pub(super) async fn status_of(
        &self,
        pool: Pool,
        tiers: &Tiers,
        counts: [u64; 6],
    ) -> Result<PoolStatus, StoreError> {
        let [assigned, available, draining, not_ready, quarantined, waiting] =
            counts.map(|count| count as usize);
        let (mut active_calls, mut free_slots) = (0, 0);
        let mut cursor = (assigned > 0).then(|| "0".to_owned());
        while let Some(from) = cursor {
            let args = [&pool.as_tier_value(), from.as_str(), "200"];
            let mut answer = self.run(&self.scripts.pool_load, &args).await?;
            cursor = Some(answer.text()?).filter(|next| next != "0");
            active_calls += answer.number()? as usize;
            free_slots += answer.number()? as usize;
        }
        Ok(PoolStatus {
            kind: tiers.kind(&pool),
            target: tiers.target(&pool),
            assigned,
            available,
            draining,
            not_ready,
            quarantined,
            waiting,
            active_calls,
            free_slots,
            pool,
        })
    }
}
