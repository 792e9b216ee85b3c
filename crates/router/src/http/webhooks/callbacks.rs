//! `/{provider}/call-status` and `/{provider}/stream-status`: the provider says
//! what has become of a call or of its stream. What is over is released, however
//! often and in whatever order it is said.

use axum::{
    extract::{Request, State},
    response::Response,
};

use super::{UNAVAILABLE, answer, receive, refuse};
use crate::http::{ApiError, Noted, Shared, api::release::end};
use fleet::{Cause, Confirm, Confirmed, Release, names::PodName};
use telephony::{Covered, Provider, Webhook, call_of};

/// What a callback is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum About {
    Call,
    Stream,
}

pub(crate) async fn callback(
    State(context): Shared,
    provider: Provider,
    about: About,
    request: Request,
) -> Response {
    let dialect = provider.dialect();
    let read = |webhook: &Webhook<'_>| {
        let call = call_of(provider, webhook)?;
        // We put the pod into the URLs of streams: what is said late of a call's
        // former stream must not end the one it has now.
        let pod = webhook.query.get("pod_name").filter(|pod| !pod.is_empty());
        let pod: Option<PodName> = pod.map(str::parse).transpose()?;
        let attempt = webhook.query.get("attempt").and_then(|attempt| attempt.parse().ok());
        let is_over = match about {
            About::Call => dialect.call_is_over(webhook),
            About::Stream => dialect.stream_is_over(webhook),
        };
        let is_over = is_over.ok_or_else(|| {
            ApiError::bad_request(
                "it does not say what has become of the call: is this the right URL?",
            )
        })?;
        let has_started = about == About::Stream && dialect.stream_has_started(webhook);
        let cause = match about {
            About::Call => Cause::Provider,
            About::Stream => Cause::Stream,
        };
        Ok((Release { call, pod, attempt, cause }, is_over, has_started))
    };
    let (release, is_over, has_started) =
        match receive(&context, provider, request, Covered::Body, read).await {
            Ok(told) => told,
            Err(response) => return response,
        };
    if let (true, Some(pod), Some(_)) = (has_started, &release.pod, context.ttls.connect) {
        let confirm = Confirm {
            call: release.call.clone(),
            pod: pod.clone(),
            attempt: release.attempt,
            lease_ttl: context.ttls.lease,
        };
        let mut noted =
            Noted { call: Some(release.call.clone()), pod: Some(pod.clone()), ..Noted::default() };
        return match context.store.confirm(&confirm).await {
            Ok(confirmed) => {
                noted.outcome = match confirmed {
                    Confirmed::Sure => "confirmed",
                    Confirmed::Retaken { .. } => "retaken",
                    Confirmed::Unknown => "not_found",
                };
                noted.on(answer(dialect.noted()))
            }
            Err(error) => {
                noted.outcome = "storage_error";
                noted.on(refuse(provider, UNAVAILABLE, error.into()))
            }
        };
    }
    if !is_over {
        let noted = Noted { call: Some(release.call), outcome: "ongoing", ..Noted::default() };
        return noted.on(answer(dialect.noted()));
    }
    match end(&context, release).await {
        // That it is over already is what is expected: the agent was faster.
        (noted, Ok(_)) => noted.on(answer(dialect.noted())),
        (noted, Err(error)) => noted.on(refuse(provider, UNAVAILABLE, error.into())),
    }
}
