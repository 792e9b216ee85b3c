//! `/reservations`: capacity for dials.

use std::time::Duration;

use axum::{
    Json,
    extract::State,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::{PartialSchema, ToSchema};

use super::dial_queues;
use crate::{
    http::{
        ApiError, Context, RequestLog, Shared,
        middleware::body::JsonBody,
        openapi::{Endpoint, Group, schemas},
        reply::PathName,
        webhooks::query::Query,
    },
    human_duration::HumanDuration,
};
use fleet::{
    DialRefused, Millis, ReservationNotFound, ReservationQuery, ReservationStatus, Reserve,
    Reserved,
    names::{AccountName, CallSid, MerchantId, PhoneNumber, ReservationId},
    rules::MAX_RESERVATIONS,
    rules::PROBABILITY_UNIT,
};
use telephony::Provider;

/// The error of a request without a grant.
const NONE_GRANTED: &str = "no reservation was granted";
/// The longest long poll.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// The configuration of outbound calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OutboundConfig {
    pub(crate) reservation_ttl: Millis,
    /// Share of answered dials that may find no pod, in millionths.
    pub(crate) miss_target: u32,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = Reserve)]
pub(crate) struct Body {
    #[schema(value_type = schemas::MerchantId, required)]
    merchant_id: Option<String>,
    /// The number that the call is made from.
    #[schema(schema_with = schemas::optional_number)]
    number: Option<String>,
    /// The provider that makes the call.
    #[schema(schema_with = schemas::dialling_provider)]
    provider: Option<String>,
    /// The account at the provider.
    #[schema(schema_with = schemas::optional_name)]
    account: Option<String>,
    #[schema(schema_with = schemas::reservation_count)]
    count: Option<Value>,
    /// Longest time to wait for the first reservation.
    #[schema(schema_with = schemas::wait_for_pod)]
    wait: Option<String>,
}

#[derive(Serialize, ToSchema)]
struct Granted {
    #[schema(value_type = schemas::ReservationId)]
    id: ReservationId,
    /// Unix seconds.
    expires_at: f64,
}

#[derive(Serialize, ToSchema)]
struct ReserveResponse {
    /// Only if none was granted.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'static str>,
    reservations: Vec<Granted>,
    /// Reservations that were not granted.
    refused: usize,
    /// The limit that refused them.
    #[schema(schema_with = schemas::dial_limit)]
    reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = Reservation)]
struct ReservationJson {
    #[schema(value_type = schemas::ReservationId)]
    id: ReservationId,
    #[schema(value_type = schemas::MerchantId)]
    merchant_id: MerchantId,
    /// The pool whose slots are held.
    #[schema(value_type = schemas::Pool)]
    pool: String,
    #[schema(schema_with = schemas::optional_number, required)]
    number: Option<PhoneNumber>,
    /// The account whose rate limit counted the dial.
    #[schema(schema_with = schemas::optional_account, required)]
    account: Option<AccountName>,
    /// The provider's call, once it was reported as dialed.
    #[schema(schema_with = schemas::any_text, required)]
    call_sid: Option<CallSid>,
    /// Probability of an answer at the grant.
    answer_probability: f64,
    /// Unix seconds.
    granted_at: f64,
    /// Unix seconds.
    expires_at: f64,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Reservations {
    /// By expiry.
    reservations: Vec<ReservationJson>,
    /// Cursor of the next page.
    #[schema(required)]
    next: Option<String>,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = Dialed)]
pub(crate) struct DialedBody {
    #[schema(value_type = schemas::CallSid, required)]
    call_sid: Option<String>,
}

#[derive(Serialize, ToSchema)]
struct DialedResponse {
    #[schema(value_type = schemas::ReservationId)]
    id: ReservationId,
    /// Unix seconds.
    expires_at: f64,
    success: bool,
}

#[derive(Serialize, ToSchema)]
struct GivenBack {
    #[schema(value_type = schemas::ReservationId)]
    id: ReservationId,
    success: bool,
}

fn seconds(time: Millis) -> f64 {
    time as f64 / 1_000.0
}

fn example_id() -> ReservationId {
    "R5f3a09c2b1d4e687".parse().expect("an id")
}

fn example() -> ReservationJson {
    ReservationJson {
        id: example_id(),
        merchant_id: "acme".parse().expect("a name"),
        pool: "pool:gold".into(),
        number: "+14155550100".parse().ok(),
        account: "twilio".parse().ok(),
        call_sid: "CA1".parse().ok(),
        answer_probability: 0.5,
        granted_at: 1_763_280_000.0,
        expires_at: 1_763_280_075.0,
    }
}

fn granted_example(granted: bool) -> ReserveResponse {
    let grant = Granted { id: example_id(), expires_at: 1_763_280_075.0 };
    ReserveResponse {
        error: (!granted).then_some(NONE_GRANTED),
        reservations: granted.then_some(grant).into_iter().collect(),
        refused: usize::from(!granted),
        reason: (!granted).then_some("capacity"),
        warnings: Vec::new(),
    }
}

pub(crate) fn post_endpoint() -> Endpoint {
    Endpoint::new(Group::Calls, "Reserve capacity for dials")
        .description(
            "Grants as many of `count` reservations as the limits allow now. With `wait` the \
             request is a long poll: it returns when at least one is granted or the time is over. \
             `reason` is the limit that refused the others.",
        )
        .json_body::<Body>(json!({
            "merchant_id": "acme", "number": "+14155550100", "provider": "twilio", "count": 1,
            "wait": "20s",
        }))
        .responds(granted_example(true))
        .responds_with(429, "None was granted; `Retry-After` says when to ask again.", {
            granted_example(false)
        })
        .uses_store()
}

pub(crate) fn list_endpoint() -> Endpoint {
    Endpoint::new(Group::Calls, "List outstanding reservations by expiry")
        .query_param("merchant", schemas::merchant_or_empty(), "Only this merchant's.")
        .paginated(100, 1_000)
        .responds(Reservations { reservations: vec![example()], next: None })
        .uses_store()
}

fn reservation_endpoint(summary: &str) -> Endpoint {
    Endpoint::new(Group::Calls, summary)
        .path_param("id", schemas::ReservationId::schema(), example_id().as_str())
        .error(400, "The id is invalid.")
        .error_with(
            404,
            "No such reservation is outstanding: it was used, has expired or was given back.",
            json!({"error": "reservation not found"}),
        )
        .uses_store()
}

pub(crate) fn get_endpoint() -> Endpoint {
    reservation_endpoint("Get an outstanding reservation").responds(example())
}

pub(crate) fn dialed_endpoint() -> Endpoint {
    reservation_endpoint("Report the provider's call of a reservation")
        .description(
            "The provider's status callbacks of the call (no-answer, busy, failed, canceled) then \
             end the reservation at once. It expires `RESERVATION_TTL` after this request. A \
             repeated request changes nothing.",
        )
        .json_body::<DialedBody>(json!({"call_sid": "CA1"}))
        .error_with(
            409,
            "The call is the dial of another outstanding reservation, or is in progress.",
            json!({"error": "the call is the dial of reservation R5f3a09c2b1d4e687"}),
        )
        .responds(DialedResponse { id: example_id(), expires_at: 1_763_280_075.0, success: true })
}

pub(crate) fn delete_endpoint() -> Endpoint {
    reservation_endpoint("Give a reservation back")
        .responds(GivenBack { id: example_id(), success: true })
}

pub(crate) async fn post(
    State(context): Shared,
    JsonBody(body): JsonBody<Body>,
) -> Result<Response, ApiError> {
    let wait = read_wait(body.wait.as_deref())?;
    let request = read_request(&context, &body)?;
    let reserved = dial_queues::reserve(&context, &request, wait).await?;
    Ok(respond(&context, &request, reserved))
}

fn respond(context: &Context, request: &Reserve, reserved: Reserved) -> Response {
    let Reserved { granted, until, limit, retry_after, malformed_merchant } = reserved;
    let refused = request.ids.len() - granted.len();
    context.metrics.outbound.granted(granted.len());
    if let Some(limit) = limit.filter(|_| granted.is_empty()) {
        context.metrics.outbound.refused(limit);
    }
    let mut log = RequestLog { outcome: "reserved", ..RequestLog::default() };
    let warnings = malformed_merchant.map(|error| {
        let merchant = &request.merchant;
        tracing::warn!(%merchant, %error, "merchant document is malformed; using the default chain");
        format!("the document of {merchant} is malformed ({error}): the default chain applies")
    });
    let body = ReserveResponse {
        error: granted.is_empty().then_some(NONE_GRANTED),
        reservations: granted
            .into_iter()
            .map(|id| Granted { id, expires_at: seconds(until) })
            .collect(),
        refused,
        reason: limit.map(|limit| limit.as_str()),
        warnings: warnings.into_iter().collect(),
    };
    if !body.reservations.is_empty() {
        return log.attach(Json(body));
    }
    log.outcome = "not_reserved";
    log.reason = body.reason.map(str::to_owned);
    let mut response = (StatusCode::TOO_MANY_REQUESTS, Json(body)).into_response();
    let retry_after = HeaderValue::from(retry_after.div_ceil(1_000).max(1));
    response.headers_mut().insert(header::RETRY_AFTER, retry_after);
    log.attach(response)
}

fn invalid(field: &str, error: String) -> ApiError {
    ApiError { details: Some(json!({"field": field})), ..ApiError::bad_request(error) }
}

fn read_wait(text: Option<&str>) -> Result<Duration, ApiError> {
    let wait = match text {
        None | Some("" | "0" | "0s" | "0ms") => return Ok(Duration::ZERO),
        Some(text) => text.parse::<HumanDuration>().map_err(|expected| {
            invalid("wait", format!("wait {text:?} is not valid: expected {expected}"))
        })?,
    };
    let wait = Duration::from_millis(wait.millis());
    if wait > MAX_WAIT {
        return Err(invalid("wait", "wait: expected at most 60s".into()));
    }
    Ok(wait)
}

fn read_request(context: &Context, body: &Body) -> Result<Reserve, ApiError> {
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let number = given(&body.number).map(|text| PhoneNumber::parse(&text)).transpose()?;
    let count = match &body.count {
        None | Some(Value::Null) => 1,
        Some(value) => {
            // Accepts 2.0: JSON does not separate integers from floats.
            let whole = value.as_f64().filter(|number| number.fract() == 0.0);
            let count = whole.filter(|number| (1.0..=MAX_RESERVATIONS as f64).contains(number));
            count.map(|count| count as usize).ok_or_else(|| {
                let expected = format!("expected a whole number from 1 to {MAX_RESERVATIONS}");
                invalid("count", format!("count {value}: {expected}"))
            })?
        }
    };
    let OutboundConfig { reservation_ttl, miss_target } = context.outbound;
    Ok(Reserve {
        ids: (0..count).map(|_| new_id()).collect(),
        merchant: body.merchant_id.clone().unwrap_or_default().parse()?,
        number,
        accounts: read_accounts(given(&body.provider), given(&body.account))?,
        ttl: reservation_ttl,
        miss_target,
    })
}

/// The accounts whose limit may apply: the named one, then that of the provider as a whole.
fn read_accounts(
    provider: Option<String>,
    account: Option<String>,
) -> Result<Vec<AccountName>, ApiError> {
    let Some(provider) = provider else {
        return match account {
            None => Ok(Vec::new()),
            Some(_) => Err(invalid("provider", "account needs a provider".into())),
        };
    };
    let provider: Provider = provider.parse()?;
    let account = account.map(|account| format!("{provider}:{account}").parse()).transpose()?;
    Ok(account.into_iter().chain(provider.as_str().parse().ok()).collect())
}

fn new_id() -> ReservationId {
    let text = format!("R{:08x}{:08x}", crate::random_u32(), crate::random_u32());
    text.parse().expect("16 hexadecimal digits")
}

pub(crate) async fn list(
    State(context): Shared,
    query: Query,
) -> Result<Json<Reservations>, ApiError> {
    query.only(&["merchant", "limit", "cursor"])?;
    let invalid = || ApiError::bad_request("cursor: expected `next` of a previous page");
    let after = match query.cursor(&["merchant"])? {
        None => None,
        Some(text) => {
            let (until, id) = text.split_once(' ').ok_or_else(invalid)?;
            Some((until.parse().map_err(|_| invalid())?, id.parse().map_err(|_| invalid())?))
        }
    };
    let merchant = query.text("merchant").map(str::parse).transpose()?;
    let limit = query.limit(100, 1_000)?;
    let page = context.store.reservations(&ReservationQuery { merchant, after, limit }).await?;
    let next = page.next.map(|(until, id)| query.next(&["merchant"], &format!("{until} {id}")));
    let reservations = page.reservations.into_iter().map(reservation_json).collect();
    Ok(Json(Reservations { reservations, next }))
}

fn reservation_json(found: ReservationStatus) -> ReservationJson {
    let ReservationStatus { id, facts } = found;
    ReservationJson {
        id,
        merchant_id: facts.merchant,
        pool: facts.pool.to_string(),
        number: facts.number,
        account: facts.account,
        call_sid: facts.call,
        answer_probability: facts.probability as f64 / PROBABILITY_UNIT as f64,
        granted_at: seconds(facts.at),
        expires_at: seconds(facts.until),
    }
}

fn not_found(_: ReservationNotFound) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "reservation not found: used, expired or given back")
}

pub(crate) async fn get(
    State(context): Shared,
    PathName(id): PathName<ReservationId>,
) -> Result<Response, ApiError> {
    let found = context.store.reservation(&id).await?;
    let found = found.ok_or_else(|| not_found(ReservationNotFound))?;
    Ok(Json(reservation_json(found)).into_response())
}

pub(crate) async fn dialed(
    State(context): Shared,
    PathName(id): PathName<ReservationId>,
    JsonBody(body): JsonBody<DialedBody>,
) -> Result<Response, ApiError> {
    let call: CallSid = body.call_sid.unwrap_or_default().parse()?;
    let ttl = context.outbound.reservation_ttl;
    let until = context.store.dialed(&id, &call, ttl).await?.map_err(|refused| match refused {
        DialRefused::NotFound(error) => not_found(error),
        DialRefused::OtherReservation(_) | DialRefused::CallInProgress => {
            ApiError::new(StatusCode::CONFLICT, refused.to_string())
        }
    })?;
    let log = RequestLog { call: Some(call), outcome: "dialed", ..RequestLog::default() };
    Ok(log.attach(Json(DialedResponse { id, expires_at: seconds(until), success: true })))
}

pub(crate) async fn delete(
    State(context): Shared,
    PathName(id): PathName<ReservationId>,
) -> Result<Response, ApiError> {
    context.store.give_back(&id).await?.map_err(not_found)?;
    context.metrics.outbound.ended("given_back");
    let log = RequestLog { outcome: "given_back", ..RequestLog::default() };
    Ok(log.attach(Json(GivenBack { id, success: true })))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(body: Value) -> Result<Reserve, String> {
        let body: Body = serde_json::from_value(body).unwrap();
        read_request(&Context::for_tests(), &body).map_err(|error| error.error)
    }

    #[tokio::test]
    async fn requests_are_checked() {
        let full = json!({"merchant_id": "acme", "number": "14155550100", "provider": "twilio",
            "account": "AC1", "count": 2.0});
        let request_1 = request(full).unwrap();
        assert_eq!((request_1.ids.len(), request_1.accounts.len()), (2, 2));
        assert_eq!(request_1.number.unwrap().as_str(), "+14155550100");
        for (bad, reason) in [
            (json!({}), "merchant_id"),
            (json!({"merchant_id": "a b"}), "merchant_id"),
            (json!({"merchant_id": "a", "count": 0}), "from 1 to 100"),
            (json!({"merchant_id": "a", "count": 101}), "from 1 to 100"),
            (json!({"merchant_id": "a", "count": 1.5}), "from 1 to 100"),
            (json!({"merchant_id": "a", "count": "1"}), "from 1 to 100"),
            (json!({"merchant_id": "a", "number": "123456789012345678"}), "E.164"),
            (json!({"merchant_id": "a", "provider": "other"}), "expected twilio"),
            (json!({"merchant_id": "a", "account": "AC1"}), "needs a provider"),
        ] {
            let error = request(bad.clone()).unwrap_err();
            assert!(error.contains(reason), "{bad}: {error}");
        }
    }

    #[test]
    fn a_wait_has_a_maximum() {
        assert_eq!(read_wait(Some("20s")).ok(), Some(Duration::from_secs(20)));
        assert_eq!(read_wait(Some("0")).ok(), Some(Duration::ZERO));
        assert!(read_wait(Some("61s")).is_err() && read_wait(Some("soon")).is_err());
    }
}
