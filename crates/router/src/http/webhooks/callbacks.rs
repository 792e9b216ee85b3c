//! `/{provider}/call-status` and `/{provider}/stream-status`: status callbacks of the provider.
//! The end of a call or of its stream releases the call. Callbacks are idempotent and may arrive
//! in any order.

use axum::{
    extract::{Request, State},
    response::Response,
};

use super::{UNAVAILABLE, document_response, receive, refuse};
use crate::http::{ApiError, RequestLog, Shared, api::release::release_call};
use fleet::{Confirm, Confirmed, EndCause, Release, names::PodName};
use telephony::{Coverage, Provider, Webhook, call_of};

/// Subject of a status callback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallbackKind {
    Call,
    Stream,
}

pub(crate) async fn callback(
    State(context): Shared,
    provider: Provider,
    kind: CallbackKind,
    request: Request,
) -> Response {
    let dialect = provider.dialect();
    let read = |webhook: &Webhook<'_>| {
        let call = call_of(provider, webhook)?;
        // Stream URLs contain the pod: a late callback for a previous stream must not end the
        // current one.
        let pod = webhook.query.get("pod_name").filter(|pod| !pod.is_empty());
        let pod: Option<PodName> = pod.map(str::parse).transpose()?;
        let pod_attempt = webhook.query.get("attempt").and_then(|text| text.parse().ok());
        let has_ended = match kind {
            CallbackKind::Call => dialect.call_ended(webhook),
            CallbackKind::Stream => dialect.stream_ended(webhook),
        };
        let has_ended = has_ended.ok_or_else(|| {
            ApiError::bad_request(
                "the request has no call or stream status; check the configured callback URL",
            )
        })?;
        let has_started = kind == CallbackKind::Stream && dialect.stream_started(webhook);
        let cause = match kind {
            CallbackKind::Call => EndCause::Provider,
            CallbackKind::Stream => EndCause::Stream,
        };
        Ok((Release { call, pod, pod_attempt, cause }, has_ended, has_started))
    };
    let (release, has_ended, has_started) =
        match receive(&context, provider, request, Coverage::Body, read).await {
            Ok(parsed) => parsed,
            Err(response) => return response,
        };
    if let (true, Some(pod), Some(_)) = (has_started, &release.pod, context.ttls.connect) {
        let confirm = Confirm {
            call: release.call.clone(),
            pod: pod.clone(),
            pod_attempt: release.pod_attempt,
            lease_ttl: context.ttls.lease,
        };
        let mut log = RequestLog {
            call: Some(release.call.clone()),
            pod: Some(pod.clone()),
            ..RequestLog::default()
        };
        return match context.store.confirm(&confirm).await {
            Ok(confirmed) => {
                log.outcome = match confirmed {
                    Confirmed::Live => "confirmed",
                    Confirmed::Reallocated { .. } => "retaken",
                    Confirmed::Unknown => "not_found",
                };
                log.attach(document_response(dialect.acknowledgement()))
            }
            Err(error) => {
                log.outcome = "storage_error";
                log.attach(refuse(provider, UNAVAILABLE, error.into()))
            }
        };
    }
    if !has_ended {
        let log =
            RequestLog { call: Some(release.call), outcome: "ongoing", ..RequestLog::default() };
        return log.attach(document_response(dialect.acknowledgement()));
    }
    match release_call(&context, release).await {
        // The agent usually releases first: an unknown call is a success, too.
        (log, Ok(_)) => log.attach(document_response(dialect.acknowledgement())),
        (log, Err(error)) => log.attach(refuse(provider, UNAVAILABLE, error.into())),
    }
}
