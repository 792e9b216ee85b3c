//! Upkeep of the gateway's streams in the store: heartbeats, renewals, released calls, and the
//! key of stream tokens.

use std::{
    collections::HashSet,
    pin::pin,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use super::{Gateway, OpenStream};
use fleet::{
    Attach, AttachRefused, CallLookup, CallQuery, ConnectedStream, Detach, EndCause, Millis,
    PodFailure, Release, Renew,
    names::{CallSid, StreamId},
};
use media::stats::Order;
use store::StoreError;

/// Interval of heartbeats, unless a lease is short.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);
/// Heartbeats and renewals per lease, at least: several may fail.
const HEARTBEATS_PER_LEASE: u32 = 3;
/// Calls per renewal.
const RENEWAL_BATCH: usize = 500;
/// Calls per heartbeat that the store compares with its own; all calls take turns.
const REPORTED_CALLS: usize = 500;
/// Heartbeats with more calls in the store than streams, between searches for those calls.
const STRAYS_INTERVAL: u32 = 2;
/// Calls per page of such a search.
const STRAYS_PAGE: usize = 500;
/// Heartbeats between reads of the shared key.
const KEY_INTERVAL: u32 = 6;
/// Heartbeats between writes of the streams' figures.
const FIGURES_INTERVAL: u32 = 2;

/// Calls that the store lists under this gateway, and that it does not relay.
#[derive(Default)]
struct Strays {
    /// Heartbeats in a row at which the store had more calls of this gateway than it relays.
    beats: u32,
    /// Calls and streams that the last search has found.
    suspects: HashSet<(CallSid, StreamId)>,
}

impl Strays {
    /// Counts a heartbeat. Returns whether the calls of the store have to be searched.
    fn is_search_due(&mut self, has_more: bool) -> bool {
        self.beats = if has_more { self.beats + 1 } else { 0 };
        if !has_more {
            self.suspects.clear();
        }
        self.beats > 0 && self.beats.is_multiple_of(STRAYS_INTERVAL)
    }
}

impl Gateway {
    /// Runs until the gateway has closed its last stream.
    pub(crate) async fn run(self: Arc<Self>) {
        let interval = self.heartbeat_interval();
        let listener = self.store.endings().listen(&self.id);
        let mut ticks = tokio::time::interval(interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut beats, mut has_failed, mut strays) = (0u32, false, Strays::default());
        loop {
            let mut notified = pin!(listener.notified());
            notified.as_mut().enable();
            if beats.is_multiple_of(KEY_INTERVAL)
                && let Err(error) = self.keys.refresh(self.store.as_ref()).await
            {
                tracing::debug!(%error, "cannot read the key of stream tokens; retrying");
            }
            beats = beats.wrapping_add(1);
            match self.beat(&mut strays).await {
                Ok(()) => {
                    has_failed = false;
                    if beats.is_multiple_of(FIGURES_INTERVAL) {
                        self.publish_figures(interval).await;
                    }
                }
                Err(error) if !has_failed => {
                    has_failed = true;
                    tracing::warn!(%error, "a heartbeat of the media gateway failed; retrying");
                }
                Err(_) => {}
            }
            tokio::select! {
                _ = ticks.tick() => {}
                // A call was released; the heartbeat returns it.
                () = notified => {}
                () = self.closed() => return,
            }
        }
    }

    /// Heartbeats renew the leases of calls as well as that of the gateway.
    fn heartbeat_interval(&self) -> Duration {
        let shorter = Duration::from_millis(self.lease.min(self.call_lease));
        HEARTBEAT_INTERVAL.min(shorter / HEARTBEATS_PER_LEASE)
    }

    /// Resolves when the router stops and no stream is left.
    async fn closed(&self) {
        self.lifecycle.stopping.cancelled().await;
        self.tasks.wait().await;
    }

    /// Sends one heartbeat, closes the streams of released calls, and renews leases that are due.
    /// A gateway without streams needs no lease, and to attach a stream is a heartbeat.
    async fn beat(&self, strays: &mut Strays) -> Result<(), StoreError> {
        if self.streams.count() == 0 {
            return Ok(());
        }
        let sent_at = Instant::now();
        let relayed = self.streams.next_reported(REPORTED_CALLS);
        let beat = self.store.heartbeat(&self.id, self.lease, &relayed).await?;
        for (call, cause) in &beat.ending {
            if let Some(stream) = self.streams.get(call) {
                self.carry_out(&stream, *cause).await?;
            }
        }
        // Writes are lost when a replica of Redis takes over before it has all of them.
        for stream in beat.unknown.iter().filter_map(|call| self.streams.get(call)) {
            self.attach_again(&stream).await?;
        }
        // A store that knows fewer streams has lost some: their pods would count as free.
        let has_lost = beat.calls < self.streams.attached_since(sent_at);
        // Half a heartbeat early: the age counts from the reply to the last renewal.
        let renewals = Duration::from_millis(self.call_lease) / HEARTBEATS_PER_LEASE;
        let age = renewals.saturating_sub(self.heartbeat_interval() / 2);
        let due = self.streams.due(if has_lost { Duration::ZERO } else { age });
        for batch in due.chunks(RENEWAL_BATCH) {
            self.renew(batch, has_lost).await?;
        }
        if strays.is_search_due(beat.calls > self.streams.count_with_slots()) {
            self.detach_strays(strays).await?;
        }
        Ok(())
    }

    /// Ends calls that the store lists under this gateway although it relays no stream of them:
    /// Redis has lost their detach. A stream without a reply to its attach is one of them for a
    /// moment, so that only those of two searches are ended.
    async fn detach_strays(&self, strays: &mut Strays) -> Result<(), StoreError> {
        let mut query = CallQuery { limit: STRAYS_PAGE, ..CallQuery::default() };
        let mut found = HashSet::new();
        loop {
            let page = self.store.calls(&query).await?;
            for status in page.calls.into_iter().filter_map(CallLookup::into_live) {
                let stream = status.stream.filter(|stream| stream.gateway == self.id);
                if let Some(stream) = stream
                    && self.streams.get(&status.call).is_none()
                {
                    found.insert((status.call, stream.stream));
                }
            }
            query.after = page.next;
            if query.after.is_none() {
                break;
            }
        }
        for (call, stream) in found.intersection(&strays.suspects).cloned() {
            tracing::warn!(call_sid = %call, "the store had lost the end of a stream; ending its call");
            let failure = PodFailure::default();
            let detach = Detach { call, stream, cause: EndCause::Provider, failure };
            let _ = self.store.detach(&detach).await?;
        }
        strays.suspects = found;
        Ok(())
    }

    /// Carries out the order of the store for a stream.
    async fn carry_out(&self, stream: &OpenStream, cause: EndCause) -> Result<(), StoreError> {
        match cause {
            EndCause::Displaced => stream.handle.order(Order::Move),
            // The provider asks what follows a stream that it has ended itself, while the agent
            // finishes: nothing follows.
            EndCause::Stream if stream.handle.has_provider_ended() => {
                let release = Release {
                    cause: EndCause::Provider,
                    ..Release::new(stream.call.clone(), Some(stream.connection().pod))
                };
                let _ = self.store.release(&release).await?;
            }
            _ => stream.handle.order(Order::End),
        }
        Ok(())
    }

    /// Publishes the figures of all streams, for the pages of other replicas.
    async fn publish_figures(&self, interval: Duration) {
        let ttl = (2 * FIGURES_INTERVAL * interval).as_millis() as Millis;
        if let Err(error) = self.store.record_figures(&self.streams.published(), ttl).await {
            tracing::debug!(%error, "cannot publish the figures of streams; retrying");
        }
    }

    /// Renews the leases of calls, and attaches the streams again that the store does not know.
    async fn renew(&self, streams: &[Arc<OpenStream>], all: bool) -> Result<(), StoreError> {
        let calls: Vec<CallSid> = streams.iter().map(|stream| stream.call.clone()).collect();
        let request = Renew { calls, pod: None, lease_ttl: self.call_lease };
        let renewed = self.store.renew(&request).await?;
        for stream in streams {
            if all || renewed.unknown.contains(&stream.call) {
                self.attach_again(stream).await?;
            }
            stream.set_renewed();
        }
        Ok(())
    }

    async fn attach_again(&self, stream: &OpenStream) -> Result<(), StoreError> {
        let connection = stream.connection();
        if !stream.is_settled_as(&connection.stream) || stream.is_detached.load(Ordering::Relaxed) {
            return Ok(());
        }
        let connected = ConnectedStream {
            pod: connection.pod.clone(),
            age: stream.opened.elapsed().as_millis() as Millis,
            failovers: connection.failovers(),
            merchant: connection.merchant.clone(),
        };
        let attach = Attach {
            call: stream.call.clone(),
            pod_attempt: connection.pod_attempt,
            gateway: self.id.clone(),
            gateway_lease: self.lease,
            stream: connection.stream.clone(),
            lease_ttl: self.call_lease,
            connected: Some(connected),
        };
        let (call_sid, pod) = (&stream.call, &connection.pod);
        match self.store.attach(&attach).await? {
            // The call had ended, and was allocated again by a repeated request of its provider.
            Ok(attached) if attached.pod != connection.pod => {
                tracing::warn!(
                    %call_sid, %pod, other = %attached.pod,
                    "the call of an open stream has another pod by now; moving the stream"
                );
                stream.handle.order(Order::Move);
            }
            Ok(attached) => {
                for other in &attached.displaced {
                    self.stream_metrics().conflicts.inc();
                    tracing::error!(
                        %call_sid, %pod, displaced = %other,
                        "two calls had one exclusive pod; the later one moves to another pod"
                    );
                }
                if attached.is_reallocated {
                    tracing::warn!(%call_sid, %pod, "the store had lost a stream; attached it again");
                }
            }
            // A failover was faster: the store knows the stream by its next id.
            Err(_) if !stream.is_settled_as(&connection.stream) => {}
            // The pods of a store that began empty are not known yet; the next heartbeat retries.
            Err(AttachRefused::UnknownPod) => {}
            Err(AttachRefused::NoPods) => {
                self.stream_metrics().conflicts.inc();
                tracing::error!(
                    %call_sid, %pod,
                    "the pod of an open stream was given to an earlier call; moving to another pod"
                );
                stream.handle.order(Order::Move);
            }
            Err(refused) => {
                tracing::warn!(
                    %call_sid, %pod, %refused,
                    "the call of an open stream has ended in the store; closing the stream"
                );
                stream.is_detached.store(true, Ordering::Relaxed);
                stream.handle.order(Order::End);
            }
        }
        Ok(())
    }
}
