//! Media streams: attach, detach, heartbeats of gateways, and the key of stream tokens.

use super::{
    Redis, calls::released, deferred_writes::DeferredWrite, keys, operations::unexpected,
    reply::FunctionReply, retry::Deadline,
};
use crate::StoreError;
use fleet::{
    Attach, AttachRefused, Attached, ConnectedStream, Detach, Failover, FailoverRefused, Heartbeat,
    Millis, NotReleased, Released,
    names::{CallSid, GatewayId},
};

/// Streams per run of the Redis function.
const FIGURES_BATCH: usize = 200;

impl Redis {
    /// A failed attach may have taken effect: the gateway detaches the stream after it.
    pub(super) async fn attach_stream(
        &self,
        request: &Attach,
    ) -> Result<Result<Attached, AttachRefused>, StoreError> {
        let [attempt, gateway_lease, lease] =
            [u64::from(request.pod_attempt), request.gateway_lease, request.lease_ttl]
                .map(|number| number.to_string());
        let connected = request.connected.as_ref().map_or_else(String::new, |connected| {
            let ConnectedStream { pod, age, failovers, merchant } = connected;
            let merchant = merchant.as_ref().map_or("-", |merchant| merchant.as_str());
            format!("{pod} {age} {failovers} {merchant}")
        });
        let args = [
            request.call.as_str(),
            &attempt,
            request.gateway.as_str(),
            &gateway_lease,
            request.stream.as_str(),
            &lease,
            &self.record_expiry(request.lease_ttl),
            &connected,
        ];
        let mut reply = self.run(&self.functions().attach, &args).await?;
        match reply.word.as_str() {
            "attached" => attached(&mut reply).map(Ok),
            "refused" => Ok(Err(match reply.text()?.as_str() {
                "not_found" => AttachRefused::NotFound,
                "other_attempt" => AttachRefused::OtherAttempt,
                "already_attached" => AttachRefused::AlreadyAttached,
                "no_pods" => AttachRefused::NoPods,
                "unknown_pod" => AttachRefused::UnknownPod,
                _ => return Err(unexpected(&reply)),
            })),
            _ => Err(unexpected(&reply)),
        }
    }

    /// A failed failover may have taken effect: a repeat with the same stream ids is safe.
    pub(super) async fn move_stream(
        &self,
        request: &Failover,
    ) -> Result<Result<Attached, FailoverRefused>, StoreError> {
        let [gateway_lease, max_retries, lease] =
            [request.gateway_lease, u64::from(request.max_retries), request.lease_ttl]
                .map(|number| number.to_string());
        let args = [
            request.call.as_str(),
            request.stream.as_str(),
            request.next.as_str(),
            request.gateway.as_str(),
            &gateway_lease,
            request.cause.as_str(),
            &max_retries,
            &lease,
            &self.record_expiry(request.lease_ttl),
            request.failure.as_str(),
        ];
        let mut reply = self.run(&self.functions().failover, &args).await?;
        match reply.word.as_str() {
            "attached" => attached(&mut reply).map(Ok),
            "refused" => Ok(Err(match reply.text()?.as_str() {
                "not_found" => FailoverRefused::NotFound,
                "ending" => FailoverRefused::Ending,
                "spent" => FailoverRefused::RetriesExhausted,
                "no_pods" => FailoverRefused::NoPods,
                _ => return Err(unexpected(&reply)),
            })),
            _ => Err(unexpected(&reply)),
        }
    }

    pub(super) async fn detach_stream(
        &self,
        request: &Detach,
    ) -> Result<Result<Released, NotReleased>, StoreError> {
        let args = detach_args(request);
        let reply = self.client.run(&self.functions().detach, &args, Deadline::None).await;
        let reply = reply.map_err(StoreError::from);
        if let Err(StoreError::Unavailable(_) | StoreError::Busy) = &reply {
            // The stream has ended even if Redis cannot record it now.
            self.enqueue(DeferredWrite::Detach(request.clone()));
        }
        released(reply?)
    }

    pub(super) async fn gateway_heartbeat(
        &self,
        gateway: &GatewayId,
        lease: Millis,
        relayed: &[CallSid],
    ) -> Result<Heartbeat, StoreError> {
        let lease = lease.to_string();
        let mut args = vec![gateway.as_str(), &lease];
        args.extend(relayed.iter().map(CallSid::as_str));
        let mut reply = self.run(&self.functions().heartbeat, &args).await?;
        let orders = reply.texts()?;
        // Skip invalid names, which only a manual edit can have written.
        let order = |pair: &[String]| Some((pair[0].parse().ok()?, pair[1].parse().ok()?));
        let ending = orders.chunks_exact(2).filter_map(order).collect();
        let calls = reply.number()? as usize;
        let unknown = reply.texts()?.iter().filter_map(|call| call.parse().ok()).collect();
        Ok(Heartbeat { ending, calls, unknown })
    }

    pub(super) async fn record_stream_figures(
        &self,
        figures: &[(CallSid, String)],
        ttl: Millis,
    ) -> Result<(), StoreError> {
        let ttl = ttl.to_string();
        for batch in figures.chunks(FIGURES_BATCH) {
            let mut args = vec![ttl.as_str()];
            args.extend(batch.iter().flat_map(|(call, text)| [call.as_str(), text]));
            self.run(&self.functions().record_figures, &args).await?;
        }
        Ok(())
    }

    /// The key in force, or this one if there was none.
    pub(super) async fn shared_media_secret(&self, candidate: &str) -> Result<String, StoreError> {
        let key = self.key(keys::MEDIA_SECRET);
        // A full Redis refuses the write, even of a key that exists.
        let known: Option<String> = self.query_key(&key, redis::cmd("GET").arg(&key)).await?;
        if let Some(known) = known {
            return Ok(known);
        }
        let command = redis::cmd("SET").arg(&key).arg(candidate).arg("NX").arg("GET").to_owned();
        let known: Option<String> = self.query_key(&key, &command).await?;
        Ok(known.unwrap_or_else(|| candidate.to_owned()))
    }
}

fn attached(reply: &mut FunctionReply) -> Result<Attached, StoreError> {
    Ok(Attached {
        pod: reply.parse()?,
        address: reply.text()?,
        pool: reply.parse()?,
        merchant: reply.parse_some()?,
        is_reallocated: reply.flag()?,
        ordinal: reply.number()? as u32,
        displaced: reply.texts()?.iter().filter_map(|call| call.parse().ok()).collect(),
    })
}

pub(super) fn detach_args(request: &Detach) -> [&str; 4] {
    let Detach { call, stream, cause, failure } = request;
    [call.as_str(), stream.as_str(), cause.as_str(), failure.as_str()]
}
