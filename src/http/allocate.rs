//! `POST /allocate`: a pod for a call, in JSON.

use axum::{Json, extract::State, response::Response};
use serde::{Deserialize, Serialize};

use super::{ApiError, Context, Noted, Shared, body::JsonBody};
use crate::{
    domain::{
        Millis,
        fleet::{Allocate, Allocation, Refusal},
        merchant::Limit,
    },
    store::StoreError,
    telephony::{CallParts, CallRequest, Provider},
};

#[derive(Deserialize)]
pub struct Body {
    call_sid: Option<String>,
    merchant_id: Option<String>,
    provider: Option<String>,
    flow: Option<String>,
    template: Option<String>,
}

#[derive(Serialize)]
struct Allocated {
    success: bool,
    pod_name: String,
    ws_url: String,
    source_pool: String,
    was_existing: bool,
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
            NotConnected::Refused(Refusal { limit: Some(limit), .. }) => Self::limited(*limit),
            NotConnected::Refused(refusal) => Self::no_pods(&refusal.tried),
            NotConnected::Store(error) => Self::from(error.clone()),
        }
    }
}

/// Asks the store for a pod, and counts and notes what came of it. `connect` is how
/// long the call may wait for its stream, if that will be told.
pub async fn connect(
    context: &Context,
    request: &CallRequest,
    connect: Option<Millis>,
) -> (Noted, Result<Connected, NotConnected>) {
    let allocate = Allocate {
        call: request.call.clone(),
        merchant: request.merchant.clone(),
        lease_ttl: connect.unwrap_or(context.ttls.lease),
        provisional: connect.is_some(),
    };
    let mut noted = Noted { call: Some(request.call.clone()), ..Noted::default() };
    let outcome = context.store.allocate(&allocate).await;
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
            noted.outcome = if allocation.was_existing { "existing" } else { "success" };
            context.metrics.allocated(Some(&allocation.pool), noted.outcome);
            noted.pod = Some(allocation.pod.clone());
            noted.pool = Some(allocation.pool.to_string());
            noted.tried = allocation.tried.clone();
            let ws_url = context.urls.url(&allocation.pod, request);
            (noted, Ok(Connected { allocation, ws_url }))
        }
        Ok(Err(refusal)) => {
            noted.outcome = refusal.limit.map_or("no_pods", Limit::as_str);
            noted.tried = refusal.tried.clone();
            match refusal.limit {
                Some(limit) => context.metrics.limited(limit.as_str()),
                None => context.metrics.refused(&refusal.tried),
            }
            (noted, Err(NotConnected::Refused(refusal)))
        }
        Err(error) => {
            noted.outcome = "storage_error";
            context.metrics.allocated(None, noted.outcome);
            (noted, Err(NotConnected::Store(error)))
        }
    }
}

pub async fn allocate(
    State(context): Shared,
    JsonBody(body): JsonBody<Body>,
) -> Result<Response, ApiError> {
    let provider = match body.provider.as_deref() {
        None | Some("") => Provider::default(),
        Some(name) => name.parse()?,
    };
    let parts = CallParts {
        call: body.call_sid.as_deref(),
        merchant: body.merchant_id.as_deref(),
        flow: body.flow.as_deref(),
        template: body.template.as_deref(),
    };
    let request = CallRequest::new(provider, parts)?;
    let (noted, outcome) = connect(&context, &request, None).await;
    Ok(match outcome {
        Err(failure) => noted.on(ApiError::from(&failure)),
        Ok(Connected { allocation, ws_url }) => noted.on(Json(Allocated {
            success: true,
            pod_name: allocation.pod.to_string(),
            ws_url,
            source_pool: allocation.pool.to_string(),
            was_existing: allocation.was_existing,
        })),
    })
}
