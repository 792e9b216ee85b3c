//! Operations that run a Redis function several times, page by page.

use std::collections::BTreeMap;

use super::{
    Redis, keys,
    operations::{STATUS_COLUMNS, flag},
    reply::{call_row, millis, parse, pod_row},
    retry::Deadline,
};
use crate::{StoreError, pacing::Pace};
use fleet::{
    CallCursor, CallPage, CallQuery, Event, EventId, LoggedEvent, Millis, PodStatus, PoolStatus,
    names::{MerchantId, Pool},
    tiers::Tiers,
};

/// Calls that one step examines, and steps per page of the API.
const CALLS_PER_STEP: &str = "100";
const MAX_STEPS: usize = 20;
/// Pods per page: about half a millisecond of Redis's time.
const PODS_PER_PAGE: &str = "50";
/// Pending calls that one step examines.
const PENDING_BATCH: &str = "100";

impl Redis {
    /// All pods, page by page, with pauses unless a person waits for them. The scan may return a
    /// pod twice if it moves meanwhile.
    pub(super) async fn list_pods(&self) -> Result<Vec<PodStatus>, StoreError> {
        let (mut pods, mut pace) = (BTreeMap::new(), Pace::default());
        let mut cursor = "0".to_owned();
        loop {
            let args = [cursor.as_str(), PODS_PER_PAGE];
            let page = self.run(&self.functions().pods, &args);
            let mut reply = if crate::is_observing() { page.await } else { pace.step(page).await }?;
            cursor = reply.text()?;
            for row in reply.list()? {
                match pod_row(row) {
                    Ok(pod) => drop(pods.insert(pod.name.clone(), pod)),
                    Err(error) => {
                        tracing::warn!(%error, "skipping a pod whose record is malformed")
                    }
                }
            }
            if cursor == "0" {
                return Ok(pods.into_values().collect());
            }
        }
    }

    /// One page of calls. Each step examines a bounded number of calls, and the number of steps is
    /// bounded: if few calls match, a page may be short although more pages follow.
    pub(super) async fn list_calls(&self, query: &CallQuery) -> Result<CallPage, StoreError> {
        let pool = query.pool.as_ref().map(Pool::to_string).unwrap_or_default();
        let merchant = query.merchant.as_ref().map_or("", |id| id.as_str());
        let pod = query.pod.as_ref().map_or("", |pod| pod.as_str());
        let mut page = CallPage { calls: Vec::new(), next: query.after.clone() };
        for _ in 0..MAX_STEPS {
            let (until, call) = match &page.next {
                Some(CallCursor { until, call }) => (until.to_string(), call.to_string()),
                None => (String::new(), String::new()),
            };
            let waiting = flag(query.waiting);
            let args = [waiting, &pool, merchant, pod, &until, &call, CALLS_PER_STEP];
            let mut reply = self.run(&self.functions().calls, &args).await?;
            let (until, call) = (reply.text()?, reply.text()?);
            for row in reply.list()? {
                match call_row(row) {
                    Ok(found) => page.calls.push(found),
                    Err(error) => {
                        tracing::warn!(%error, "skipping a call whose record is malformed")
                    }
                }
            }
            if page.calls.len() > query.limit {
                page.calls.truncate(query.limit);
                page.next = page.calls.last().map(CallCursor::of);
                return Ok(page);
            }
            page.next = if call.is_empty() {
                None
            } else {
                Some(CallCursor { until: millis(&until)?, call: parse(&call)? })
            };
            if page.next.is_none() || page.calls.len() == query.limit {
                break;
            }
        }
        Ok(page)
    }

    pub(super) async fn list_merchants(
        &self,
        after: Option<&MerchantId>,
        limit: usize,
    ) -> Result<Vec<(MerchantId, String)>, StoreError> {
        let key = self.key(keys::MERCHANT_CONFIG);
        let names: Vec<String> = self.query_key(&key, redis::cmd("HKEYS").arg(&key)).await?;
        // Skip invalid names, which only a manual edit can have written.
        let mut names: Vec<MerchantId> =
            names.iter().filter_map(|name| name.parse().ok()).collect();
        names.retain(|name| after.is_none_or(|after| name > after));
        names.sort();
        names.truncate(limit);
        if names.is_empty() {
            return Ok(Vec::new());
        }
        let mut get = redis::cmd("HMGET");
        get.arg(&key);
        for name in &names {
            get.arg(name.as_str());
        }
        let documents: Vec<Option<String>> = self.query_key(&key, &get).await?;
        let both = names.into_iter().zip(documents);
        Ok(both.filter_map(|(name, document)| Some((name, document?))).collect())
    }

    pub(super) async fn events(
        &self,
        command: &str,
        range: [String; 2],
        limit: usize,
    ) -> Result<Vec<LoggedEvent>, StoreError> {
        let mut command = redis::cmd(command);
        command.arg(self.key(keys::EVENTS)).arg(&range).arg("COUNT").arg(limit);
        let entries = self.query_unless_wrong_type(&command).await?;
        let entries: Vec<(String, Vec<String>)> = entries.unwrap_or_default();
        let read = |(id, fields): (String, Vec<String>)| {
            let event = Event::read(fields.first()?, fields.get(1)?)?;
            let id: EventId = id.parse().ok()?;
            Some(LoggedEvent { id, at: id.at, event })
        };
        Ok(entries.into_iter().filter_map(read).collect())
    }

    /// Extends all pending calls, page by page. The first page fixes the bound of all: a bound that
    /// moved with the clock would include extended calls again.
    pub(super) async fn extend_all_pending(&self, time: Millis) -> Result<(), StoreError> {
        let time = time.to_string();
        for index in [keys::CALLS, keys::WAITING] {
            let (mut bound, mut deadline, mut call) = (String::new(), String::new(), String::new());
            loop {
                let args = [index, &bound, &time, PENDING_BATCH, &deadline, &call];
                let function = &self.functions().extend_pending;
                let mut reply =
                    self.client.run_unchecked(function, &args, Deadline::Enforced).await?;
                bound = reply.text()?;
                if reply.flag()? {
                    break;
                }
                (deadline, call) = (reply.text()?, reply.text()?);
            }
        }
        Ok(())
    }

    /// The status of a pool. Where `counts` has no number of calls, its pods are counted page by
    /// page.
    pub(super) async fn pool_status(
        &self,
        pool: Pool,
        tiers: &Tiers,
        counts: [i64; STATUS_COLUMNS - 1],
    ) -> Result<PoolStatus, StoreError> {
        let is_counted = counts[6] >= 0;
        let [assigned, available, draining, not_ready, quarantined, waiting, calls, free] =
            counts.map(|count| usize::try_from(count).unwrap_or(0));
        let (mut active_calls, mut free_slots) = if is_counted { (calls, free) } else { (0, 0) };
        let mut cursor = (!is_counted).then(|| "0".to_owned());
        while let Some(from) = cursor {
            let args = [&pool.as_tier_value(), from.as_str(), "200"];
            let mut reply = self.run(&self.functions().pool_load, &args).await?;
            cursor = Some(reply.text()?).filter(|next| next != "0");
            active_calls += reply.number()? as usize;
            free_slots += reply.number()? as usize;
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
