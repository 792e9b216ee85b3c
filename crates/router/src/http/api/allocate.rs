//! `POST /allocate`: a pod for a call, in JSON.

use std::{pin::pin, time::Duration};

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::Instant;
use utoipa::ToSchema;

use crate::config::HumanDuration;
use crate::http::{
    ApiError, Context, Noted, Shared,
    middleware::body::JsonBody,
    openapi::{Endpoint, Group, schemas},
};
use fleet::{
    After, Allocate, Allocation, Hold, Millis, Refusal, Signed, Why,
    names::{Carrier, Fingerprint},
};
use store::StoreError;
use telephony::{CallParts, CallRequest, Provider};

#[derive(Deserialize, ToSchema)]
#[schema(as = Allocate)]
pub struct Body {
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
    /// How long the call may wait for a pod (`20s`).
    #[schema(schema_with = schemas::wait_for_pod)]
    wait: Option<String>,
}

#[derive(Serialize, ToSchema)]
struct Allocated<'a> {
    success: bool,
    #[schema(value_type = schemas::PodName)]
    pod_name: &'a str,
    /// Where the stream of the call goes.
    ws_url: &'a str,
    #[schema(value_type = schemas::Pool)]
    source_pool: &'a str,
    /// The call had its pod already.
    was_existing: bool,
}

pub fn described() -> Endpoint {
    Endpoint::new(Group::Calls, "A pod for a call")
        .about(
            "The same `call_sid` gets the same pod for as long as the call lives. With `wait`, \
             where calls may wait, the answer comes when there is a pod or the time is over.",
        )
        .takes::<Body>(json!({"call_sid": "CA1", "merchant_id": "acme", "template": "hello"}))
        .gives(Allocated {
            success: true,
            pod_name: "voice-agent-0",
            ws_url: "wss://voice.example.com/ws/pod/voice-agent-0/agent/voice/breeze-buddy/twilio/callback/hello/v2",
            source_pool: "pool:gold",
            was_existing: false,
        })
        .asks_store()
        .fails_with(
            503,
            "There is no pod for the call, and `details` say why; or the store can't be reached.",
            json!({
                "error": "no pods available",
                "details": {"reason": "no_pods", "chain": [{"step": "gold", "reason": "at_capacity"}]},
            }),
        )
}

/// A call that has a pod, and the URL to reach it.
pub struct Connected {
    pub allocation: Allocation,
    pub ws_url: String,
}

/// Why a call has no pod.
pub enum NotConnected {
    Refused(Refusal),
    Store(StoreError),
}

impl From<&NotConnected> for ApiError {
    fn from(failure: &NotConnected) -> Self {
        match failure {
            NotConnected::Refused(refusal) => Self::refused(refusal),
            NotConnected::Store(error) => Self::from(error.clone()),
        }
    }
}

/// How a call asks.
#[derive(Default)]
pub struct Way {
    /// How long it may wait for its stream, if that will be told.
    pub connect: Option<Millis>,
    /// It comes back when its stream is gone.
    pub returns: bool,
    pub hold: Option<Hold>,
    pub after: Option<After>,
    /// A store that has not answered by then counts as one that is out.
    pub answer_by: Option<Instant>,
    /// Of the request, if a provider has signed it.
    pub fingerprint: Option<Fingerprint>,
}

/// Asks the store for a pod, and counts and notes what came of it.
pub async fn connect(
    context: &Context,
    request: &CallRequest,
    way: Way,
) -> (Noted, Result<Connected, NotConnected>) {
    let is_rescue = way.after.is_some();
    let allocate = Allocate {
        call: request.call.clone(),
        merchant: request.merchant.clone(),
        lease_ttl: way.connect.unwrap_or(context.ttls.lease),
        provisional: way.connect.is_some(),
        returns: way.returns,
        hold: way.hold,
        after: way.after,
        signed: way
            .fingerprint
            .map(|fingerprint| Signed { fingerprint, window: context.replay_window }),
    };
    let mut noted = Noted { call: Some(request.call.clone()), ..Noted::default() };
    let asked = context.store.allocate(&allocate);
    let outcome = match way.answer_by {
        None => asked.await,
        Some(until) => tokio::time::timeout_at(until, asked)
            .await
            .unwrap_or_else(|_| Err(StoreError::Unavailable("no answer in time".into()))),
    };
    let malformed = match &outcome {
        Ok(Ok(allocation)) => allocation.malformed_merchant.as_ref(),
        Ok(Err(refusal)) => refusal.malformed_merchant.as_ref(),
        Err(_) => None,
    };
    if let (Some(malformed), Some(merchant)) = (malformed, &request.merchant) {
        context.metrics.malformed_merchants.inc();
        tracing::warn!(%merchant, %malformed, "merchant document cannot be used; taking the default chain");
    }
    match outcome {
        Ok(Ok(allocation)) => {
            noted.outcome = match &allocation {
                it if it.was_existing => "existing",
                it if is_rescue || it.attempt > 1 => "rescued",
                _ => "success",
            };
            context.metrics.allocated(Some(&allocation.pool), noted.outcome);
            if let Some(waited) = allocation.waited {
                context.metrics.waited("served", waited);
            }
            noted.pod = Some(allocation.pod.clone());
            noted.pool = Some(allocation.pool.to_string());
            noted.tried = allocation.tried.clone();
            let ws_url = context.urls.url(&allocation.pod, request);
            (noted, Ok(Connected { allocation, ws_url }))
        }
        Ok(Err(refusal)) => {
            noted.outcome = refusal.why.as_str();
            noted.tried = refusal.tried.clone();
            context.metrics.refused(&refusal);
            (noted, Err(NotConnected::Refused(refusal)))
        }
        Err(error) => {
            noted.outcome = "storage_error";
            context.metrics.allocated(None, noted.outcome);
            (noted, Err(NotConnected::Store(error)))
        }
    }
}

/// The same, but waits for as long as the call may, and answers at once when it has
/// its pod, whichever replica handed it over.
async fn connect_or_wait(
    context: &Context,
    request: &CallRequest,
    hold: Hold,
    poll: Duration,
) -> (Noted, Result<Connected, NotConnected>) {
    let asked = Instant::now();
    let until = asked + Duration::from_millis(hold.time);
    let listener = context.store.handoffs().listen(&request.call);
    loop {
        // Once the time is over nobody begins to wait again.
        let hold = match Instant::now() < until {
            true => hold,
            false => Hold { time: 0, ..hold },
        };
        let mut woken = pin!(listener.notified());
        woken.as_mut().enable();
        let (mut noted, outcome) =
            connect(context, request, Way { hold: Some(hold), ..Way::default() }).await;
        let Err(NotConnected::Refused(Refusal { why: Why::Waiting { .. }, tried, .. })) = &outcome
        else {
            return (noted, outcome);
        };
        if Instant::now() >= until + PATIENCE {
            // Its place lasts longer than this request was to wait.
            let why = Why::TimeOver { waited: asked.elapsed().as_millis() as Millis };
            noted.outcome = why.as_str();
            let refusal = Refusal { tried: tried.clone(), malformed_merchant: None, why };
            return (noted, Err(NotConnected::Refused(refusal)));
        }
        let again = (Instant::now() + poll).min(until.max(Instant::now() + SOON));
        tokio::select! {
            () = woken => {}
            () = tokio::time::sleep_until(again) => {}
            () = context.lifecycle.stopping.cancelled() => {
                noted.outcome = "stopping";
                let error = StoreError::Unavailable(
                    "this router is stopping; ask again, the place is kept".into(),
                );
                return (noted, Err(NotConnected::Store(error)));
            }
        }
    }
}

/// The store's clock may be a little behind ours.
const SOON: Duration = Duration::from_millis(10);
const PATIENCE: Duration = Duration::from_millis(100);

pub async fn allocate(
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
    let request = CallRequest { carrier, ..CallRequest::new(provider, parts)? };
    let wait: Option<HumanDuration> = match body.wait.as_deref() {
        None | Some("" | "0" | "0s") => None,
        Some(text) => Some(text.parse().map_err(|expected| {
            ApiError::bad_request(format!("wait {text:?} is not valid: expected {expected}"))
        })?),
    };
    let (noted, outcome) = match (&context.hold, wait) {
        (Some(config), Some(wait)) => {
            let hold = config.hold(wait.millis());
            connect_or_wait(&context, &request, hold, config.poll).await
        }
        _ => connect(&context, &request, Way::default()).await,
    };
    Ok(match outcome {
        Err(failure) => noted.on(ApiError::from(&failure)),
        Ok(Connected { allocation, ws_url }) => {
            let answer = Json(Allocated {
                success: true,
                pod_name: allocation.pod.as_str(),
                ws_url: &ws_url,
                source_pool: noted.pool.as_deref().unwrap_or_default(),
                was_existing: allocation.was_existing,
            })
            .into_response();
            noted.on(answer)
        }
    })
}
