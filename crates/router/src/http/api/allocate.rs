//! `POST /allocate`: allocates a pod to a call.

use std::{collections::BTreeMap, pin::pin, time::Duration};

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::Instant;
use utoipa::ToSchema;

use super::reservation_use;
use crate::http::{
    ApiError, Context, RequestLog, Shared,
    middleware::body::JsonBody,
    openapi::{Endpoint, Group, schemas},
};
use crate::human_duration::HumanDuration;
use fleet::{
    Allocate, Allocation, Hold, Millis, PreviousPod, Refusal, RefusalReason, ReservationUse,
    SignedRequest,
    names::{Carrier, Fingerprint, PhoneNumber},
};
use store::StoreError;
use telephony::{CallParts, CallRequest, Parameters, Provider};

#[derive(Deserialize, ToSchema)]
#[schema(as = Allocate)]
pub(crate) struct Body {
    #[schema(value_type = schemas::CallSid, required)]
    call_sid: Option<String>,
    #[schema(schema_with = schemas::optional_name)]
    merchant_id: Option<String>,
    #[schema(schema_with = schemas::optional_provider)]
    provider: Option<String>,
    #[schema(schema_with = schemas::optional_name)]
    flow: Option<String>,
    #[schema(schema_with = schemas::optional_name)]
    template: Option<String>,
    /// Custom values for the agent.
    #[schema(schema_with = schemas::parameters)]
    parameters: Option<BTreeMap<String, String>>,
    /// Maximum hold time (`20s`).
    #[schema(schema_with = schemas::wait_for_pod)]
    wait: Option<String>,
    /// The reservation of a dial that was answered.
    #[schema(schema_with = schemas::any_text)]
    reservation_id: Option<String>,
    /// The called number, whose line an inbound call uses.
    #[schema(schema_with = schemas::optional_number)]
    number: Option<String>,
}

#[derive(Serialize, ToSchema)]
struct AllocateResponse<'a> {
    success: bool,
    #[schema(value_type = schemas::PodName)]
    pod_name: &'a str,
    /// WebSocket URL for the stream of the call.
    ws_url: &'a str,
    #[schema(value_type = schemas::Pool)]
    source_pool: &'a str,
    /// Whether the call already had this pod.
    was_existing: bool,
    /// Conditions that the caller should know of, such as a reservation that has expired.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<&'static str>,
}

pub(crate) fn endpoint() -> Endpoint {
    Endpoint::new(Group::Calls, "Allocate a pod to a call")
        .description(
            "Idempotent: the same `call_sid` gets the same pod while the call is live. With `wait`, \
             if hold is enabled, the request is a long poll: it returns when a pod is free or \
             the time is over.",
        )
        .json_body::<Body>(json!({"call_sid": "CA1", "merchant_id": "acme", "template": "hello"}))
        .responds(AllocateResponse {
            success: true,
            pod_name: "voice-agent-0",
            ws_url: "wss://voice.example.com/ws/pod/voice-agent-0/agent/voice/breeze-buddy/twilio/callback/hello/v2",
            source_pool: "pool:gold",
            was_existing: false,
            warnings: Vec::new(),
        })
        .uses_store()
        .error_with(
            503,
            "No pod is available (`details` has the reasons), or the store is unavailable.",
            json!({
                "error": "no pods available",
                "details": {"reason": "no_pods", "chain": [{"step": "gold", "reason": "at_capacity"}]},
            }),
        )
}

/// An allocated call and its WebSocket URL.
pub(crate) struct Connected {
    pub(crate) allocation: Allocation,
    pub(crate) ws_url: String,
}

/// Reason for which a call has no pod.
pub(crate) enum NotConnected {
    Refused(Refusal),
    Store(StoreError),
}

/// The effect of a reservation on an allocate request.
pub(crate) trait ReservationEffect {
    fn reservation(&self) -> Option<&ReservationUse>;
}

impl ReservationEffect for Result<Connected, NotConnected> {
    fn reservation(&self) -> Option<&ReservationUse> {
        match self {
            Ok(connected) => connected.allocation.reservation.as_ref(),
            Err(NotConnected::Refused(refusal)) => refusal.reservation.as_ref(),
            Err(NotConnected::Store(_)) => None,
        }
    }
}

impl From<&NotConnected> for ApiError {
    fn from(failure: &NotConnected) -> Self {
        match failure {
            NotConnected::Refused(refusal) => Self::refused(refusal),
            NotConnected::Store(error) => Self::from(error.clone()),
        }
    }
}

#[derive(Default)]
pub(crate) struct AllocateOptions {
    /// Time until the stream must start, for providers that report stream starts.
    pub(crate) connect_timeout: Option<Millis>,
    /// Whether the provider requests the after-stream webhook when the stream ends.
    pub(crate) may_return: bool,
    pub(crate) hold: Option<Hold>,
    pub(crate) previous: Option<PreviousPod>,
    /// Deadline of the store's reply; after it, the store counts as unavailable.
    pub(crate) deadline: Option<Instant>,
    /// Fingerprint of a signed request.
    pub(crate) fingerprint: Option<Fingerprint>,
}

/// Allocates a pod; updates metrics and returns the access log fields with the outcome.
pub(crate) async fn connect(
    context: &Context,
    request: &CallRequest,
    options: AllocateOptions,
) -> (RequestLog, Result<Connected, NotConnected>) {
    let is_reconnect = options.previous.is_some();
    let mut log = RequestLog { call: Some(request.call.clone()), ..RequestLog::default() };
    if let Some(gateway) = context.urls.gateway()
        && let Err(error) = gateway.load_key().await
    {
        log.outcome = "storage_error";
        context.metrics.allocated(None, log.outcome);
        return (log, Err(NotConnected::Store(error)));
    }
    let deadline = options.deadline;
    let allocate = store_request(context, request, options);
    let reply = context.store.allocate(&allocate);
    let outcome = match deadline {
        None => reply.await,
        Some(deadline) => tokio::time::timeout_at(deadline, reply).await.unwrap_or_else(|_| {
            Err(StoreError::Unavailable("no reply before the deadline".into()))
        }),
    };
    warn_of_malformed_merchant(context, request, &outcome);
    log.warning = reservation_use::record_use(context, request, &outcome);
    match outcome {
        Ok(Ok(allocation)) => {
            log.outcome = match &allocation {
                it if it.was_existing => "existing",
                it if is_reconnect || it.pod_attempt > 1 => "rescued",
                _ => "success",
            };
            context.metrics.allocated(Some(&allocation.pool), log.outcome);
            if let Some(waited) = allocation.waited {
                context.metrics.waited("served", waited);
            }
            log.pod = Some(allocation.pod.clone());
            log.pool = Some(allocation.pool.to_string());
            log.tried = allocation.tried.clone();
            let Some(ws_url) = context.urls.url(request, &allocation) else {
                let error = StoreError::Unavailable("no key of stream tokens".into());
                return (log, Err(NotConnected::Store(error)));
            };
            (log, Ok(Connected { allocation, ws_url }))
        }
        Ok(Err(refusal)) => {
            log.outcome = refusal.reason.as_str();
            log.tried = refusal.tried.clone();
            context.metrics.refused(&refusal);
            (log, Err(NotConnected::Refused(refusal)))
        }
        Err(error) => {
            log.outcome = "storage_error";
            context.metrics.allocated(None, log.outcome);
            (log, Err(NotConnected::Store(error)))
        }
    }
}

/// The request to the store.
fn store_request(context: &Context, request: &CallRequest, options: AllocateOptions) -> Allocate {
    let has_gateway = context.urls.gateway().is_some();
    // Every stream reaches the gateway, whatever the provider reports.
    let connect_timeout = if has_gateway { context.ttls.connect } else { options.connect_timeout };
    Allocate {
        call: request.call.clone(),
        merchant: request.merchant.clone(),
        lease_ttl: connect_timeout.unwrap_or(context.ttls.lease),
        provisional: connect_timeout.is_some(),
        expects_stream: has_gateway,
        may_return: options.may_return,
        hold: options.hold,
        previous: options.previous,
        signed: options
            .fingerprint
            .map(|fingerprint| SignedRequest { fingerprint, window: context.replay_window }),
        reservation: request.reservation.as_ref().and_then(|text| text.parse().ok()),
        numbers: request.numbers.clone(),
    }
}

fn warn_of_malformed_merchant(
    context: &Context,
    request: &CallRequest,
    outcome: &Result<Result<Allocation, Refusal>, StoreError>,
) {
    let malformed = match outcome {
        Ok(Ok(allocation)) => allocation.malformed_merchant.as_ref(),
        Ok(Err(refusal)) => refusal.malformed_merchant.as_ref(),
        Err(_) => None,
    };
    if let (Some(malformed), Some(merchant)) = (malformed, &request.merchant) {
        context.metrics.malformed_merchants.inc();
        tracing::warn!(
            %merchant,
            %malformed,
            "merchant document is malformed; using the default chain"
        );
    }
}

/// Allocates a pod, or waits for a hand-off up to the hold time. A hand-off by any replica wakes
/// the wait.
async fn connect_or_wait(
    context: &Context,
    request: &CallRequest,
    hold: Hold,
    poll_interval: Duration,
) -> (RequestLog, Result<Connected, NotConnected>) {
    let started = Instant::now();
    let until = started + Duration::from_millis(hold.time);
    let listener = context.store.handoffs().listen(&request.call);
    loop {
        // A call whose time is over must not be enqueued again.
        let hold = match Instant::now() < until {
            true => hold,
            false => Hold { time: 0, ..hold },
        };
        let mut woken = pin!(listener.notified());
        woken.as_mut().enable();
        let (mut log, outcome) = connect(
            context,
            request,
            AllocateOptions { hold: Some(hold), ..AllocateOptions::default() },
        )
        .await;
        let Err(NotConnected::Refused(Refusal {
            reason: RefusalReason::Waiting { .. },
            tried,
            ..
        })) = &outcome
        else {
            return (log, outcome);
        };
        if Instant::now() >= until + CLOCK_SKEW {
            // The queue entry outlives the wait of this request.
            let reason =
                RefusalReason::HoldExpired { waited: started.elapsed().as_millis() as Millis };
            log.outcome = reason.as_str();
            let (tried, reservation) = (tried.clone(), None);
            let refusal = Refusal { tried, malformed_merchant: None, reason, reservation };
            return (log, Err(NotConnected::Refused(refusal)));
        }
        let next_poll =
            (Instant::now() + poll_interval).min(until.max(Instant::now() + MIN_POLL_INTERVAL));
        tokio::select! {
            () = woken => {}
            () = tokio::time::sleep_until(next_poll) => {}
            () = context.lifecycle.stopping.cancelled() => {
                log.outcome = "stopping";
                let error = StoreError::Unavailable(
                    "the router is shutting down; retry, the queue entry remains".into(),
                );
                return (log, Err(NotConnected::Store(error)));
            }
        }
    }
}

/// Time that the store's clock may be behind this router's clock.
const CLOCK_SKEW: Duration = Duration::from_millis(100);
/// Poll interval within the clock skew, after the time is over.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(10);

pub(crate) async fn allocate(
    State(context): Shared,
    JsonBody(body): JsonBody<Body>,
) -> Result<Response, ApiError> {
    let (provider, carrier) = match body.provider.as_deref() {
        None | Some("") => (Provider::default(), None),
        Some(name) => match name.parse() {
            Ok(provider) => (provider, None),
            Err(_) => (Provider::default(), Some(name.parse::<Carrier>()?)),
        },
    };
    let parts = CallParts {
        call: body.call_sid.as_deref(),
        merchant: body.merchant_id.as_deref(),
        flow: body.flow.as_deref(),
        template: body.template.as_deref(),
    };
    let values = body.parameters.iter().flatten();
    let parameters = Parameters::new(values.map(|(name, value)| (name.as_str(), value.as_str())))?;
    let number = body.number.as_deref().filter(|text| !text.is_empty());
    let numbers = number.map(PhoneNumber::parse).transpose()?.into_iter().collect();
    let reservation = body.reservation_id.clone().filter(|text| !text.is_empty());
    let request = CallRequest::new(provider, parts)?;
    let request = CallRequest { carrier, parameters, reservation, numbers, ..request };
    let wait: Option<HumanDuration> = match body.wait.as_deref() {
        None | Some("" | "0" | "0s" | "0ms") => None,
        Some(text) => Some(text.parse().map_err(|expected| {
            ApiError::bad_request(format!("wait {text:?} is not valid: expected {expected}"))
        })?),
    };
    let (log, outcome) = match (&context.hold, wait) {
        (Some(config), Some(wait)) => {
            let hold = config.hold(wait.millis());
            connect_or_wait(&context, &request, hold, config.poll_interval).await
        }
        _ => connect(&context, &request, AllocateOptions::default()).await,
    };
    Ok(match outcome {
        Err(failure) => {
            let mut error = ApiError::from(&failure);
            if let Some(warning) = log.warning {
                error.details.get_or_insert_with(|| json!({}))["warnings"] = json!([warning]);
            }
            log.attach(error)
        }
        Ok(Connected { allocation, ws_url }) => {
            let response = Json(AllocateResponse {
                success: true,
                pod_name: allocation.pod.as_str(),
                ws_url: &ws_url,
                source_pool: log.pool.as_deref().unwrap_or_default(),
                was_existing: allocation.was_existing,
                warnings: log.warning.into_iter().collect(),
            })
            .into_response();
            log.attach(response)
        }
    })
}
