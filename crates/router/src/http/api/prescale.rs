//! `/prescale`: orders for at least a number of pods until a time.

use axum::{Json, extract::State, http::StatusCode, response::Response};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::{PartialSchema, ToSchema};

use crate::{
    http::{
        ApiError, RequestLog, Shared,
        middleware::{auth::Caller, body::JsonBody},
        openapi::{Endpoint, Group, schemas},
        reply::PathName,
    },
    human_duration::HumanDuration,
};
use fleet::{
    Millis, PrescaleOrder,
    names::{InvalidName, OrderId, Pool},
    rules::MAX_PRESCALE_ORDERS,
    tiers::Tiers,
};

const MAX_PODS: u64 = 1_000_000;
/// The longest order.
const MAX_TIME: Millis = 366 * 24 * 3_600_000;

#[derive(Deserialize, ToSchema)]
#[schema(as = Prescale)]
pub(crate) struct PrescaleBody {
    #[schema(value_type = schemas::Pool, required)]
    pool: Option<String>,
    #[schema(schema_with = schemas::prescale_pods, required)]
    pods: Option<Value>,
    #[schema(schema_with = schemas::prescale_until)]
    until: Option<Value>,
    #[schema(schema_with = schemas::prescale_for)]
    r#for: Option<String>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = PrescaleOrder)]
struct OrderJson {
    #[schema(value_type = schemas::OrderId)]
    id: OrderId,
    pods: u32,
    /// The tier, or `merchant:acme`.
    pool: String,
    /// End of the order in unix seconds.
    until: u64,
}

#[derive(Serialize, ToSchema)]
struct Ordered {
    order: OrderJson,
    success: bool,
    /// Likely mistakes in the order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Orders {
    /// By end.
    orders: Vec<OrderJson>,
}

#[derive(Serialize, ToSchema)]
struct OrderDeleted {
    #[schema(value_type = schemas::OrderId)]
    id: OrderId,
    success: bool,
}

fn order_json(order: PrescaleOrder) -> OrderJson {
    let PrescaleOrder { id, pool, pods, until } = order;
    OrderJson { id, pods, pool: pool.as_tier_value(), until: until.div_ceil(1_000) }
}

fn example() -> OrderJson {
    let id = "5f3a09c2".parse().expect("an id");
    OrderJson { id, pods: 40, pool: "gold".into(), until: 1_763_305_200 }
}

pub(crate) fn list_endpoint() -> Endpoint {
    Endpoint::new(Group::Settings, "List the prescale orders in force")
        .responds(Orders { orders: vec![example()] })
        .uses_store()
}

pub(crate) fn post_endpoint() -> Endpoint {
    Endpoint::new(Group::Settings, "Order a number of pods for a time")
        .description(
            "The capacity policy asks for at least `pods` pods in the pool until the order ends, \
             within the tier's `max`. Give either `until` or `for`.",
        )
        .json_body::<PrescaleBody>(json!({"pool": "gold", "pods": 40, "for": "4h"}))
        .responds(Ordered { order: example(), success: true, warnings: Vec::new() })
        .error_with(404, "The pool does not exist.", json!({"error": "pool not found"}))
        .error(409, "The store has 100 orders already.")
        .uses_store()
}

pub(crate) fn delete_endpoint() -> Endpoint {
    Endpoint::new(Group::Settings, "Delete a prescale order")
        .path_param("id", schemas::OrderId::schema(), "5f3a09c2")
        .responds(OrderDeleted { id: example().id, success: true })
        .error(400, "The id is invalid.")
        .error_with(404, "No such order is in force.", json!({"error": "order not found"}))
        .uses_store()
}

pub(crate) async fn list(State(context): Shared) -> Result<Json<Orders>, ApiError> {
    let orders = context.store.capacity().await?.orders;
    Ok(Json(Orders { orders: orders.into_iter().map(order_json).collect() }))
}

pub(crate) async fn post(
    State(context): Shared,
    caller: Caller,
    JsonBody(body): JsonBody<PrescaleBody>,
) -> Result<Response, ApiError> {
    let pool = read_pool(body.pool.as_deref().unwrap_or_default())?;
    let pods = read_pods(body.pods.as_ref())?;
    let until = read_end(&body, context.store.now())?;
    let tiers = context.store.tiers().await?;
    if !tiers.defines(&pool) {
        return Err(ApiError::new(StatusCode::NOT_FOUND, not_found(&pool, &tiers)));
    }
    let id = format!("{:08x}", crate::random_u32()).parse()?;
    let order = PrescaleOrder { id, pool, pods, until };
    let placed = context.store.prescale(&order, &caller.to_string()).await?;
    if placed.is_err() {
        let error = format!(
            "there are {MAX_PRESCALE_ORDERS} prescale orders already: delete one, or wait for its end"
        );
        return Err(ApiError::new(StatusCode::CONFLICT, error));
    }
    let warnings = warnings(&order, &tiers);
    let log = RequestLog { outcome: "prescaled", ..RequestLog::default() };
    Ok(log.attach(Json(Ordered { order: order_json(order), success: true, warnings })))
}

pub(crate) async fn delete(
    State(context): Shared,
    PathName(id): PathName<OrderId>,
    caller: Caller,
) -> Result<Response, ApiError> {
    if !context.store.delete_prescale(&id, &caller.to_string()).await? {
        return Err(ApiError::new(StatusCode::NOT_FOUND, "order not found"));
    }
    let log = RequestLog { outcome: "prescale_deleted", ..RequestLog::default() };
    Ok(log.attach(Json(OrderDeleted { id, success: true })))
}

/// The pool is not in the tier table: a merchant's own pool and a tier may be mistaken.
fn not_found(pool: &Pool, tiers: &Tiers) -> String {
    let name = pool.as_tier_value();
    let other = match name.strip_prefix("merchant:") {
        Some(id) => format!("pool:{id}"),
        None => format!("merchant:{name}"),
    };
    let other = other.parse::<Pool>().ok().filter(|other| tiers.defines(other));
    let hint = other.map_or_else(String::new, |it| format!("; expected {}?", it.as_tier_value()));
    format!("pool not found: {name} is not in the tier table{hint}")
}

fn invalid(field: &str, error: String) -> ApiError {
    ApiError { details: Some(json!({"field": field})), ..ApiError::bad_request(error) }
}

fn read_pool(text: &str) -> Result<Pool, ApiError> {
    text.parse().map_err(|error| InvalidName { field: "pool", ..error }.into())
}

fn read_pods(value: Option<&Value>) -> Result<u32, ApiError> {
    let value = value.unwrap_or(&Value::Null);
    // Accepts 2.0: JSON does not separate integers from floats.
    let whole = value.as_f64().filter(|number| number.fract() == 0.0);
    let pods = whole.filter(|number| (1.0..=MAX_PODS as f64).contains(number));
    pods.map(|pods| pods as u32).ok_or_else(|| {
        invalid("pods", format!("pods {value}: expected a whole number from 1 to {MAX_PODS}"))
    })
}

/// Reads the end of the order.
fn read_end(body: &PrescaleBody, now: Millis) -> Result<Millis, ApiError> {
    let until = body.until.as_ref().filter(|value| !value.is_null() && **value != "");
    let time = body.r#for.as_deref().filter(|text| !text.is_empty());
    let end = match (until, time) {
        (Some(_), Some(_)) => {
            return Err(invalid("until", "expected either until or for, not both".into()));
        }
        (None, None) => {
            return Err(invalid("until", "expected until (a time) or for (a duration)".into()));
        }
        (None, Some(text)) => {
            let time: HumanDuration = text
                .parse()
                .map_err(|expected| invalid("for", format!("for {text:?}: expected {expected}")))?;
            now + time.millis()
        }
        (Some(value), None) => read_time(value).ok_or_else(|| {
            let expected = "expected unix seconds, or a time such as 2025-11-16T18:00:00Z";
            invalid("until", format!("until {value}: {expected}"))
        })?,
    };
    match end {
        _ if end <= now => Err(invalid("until", "until: expected a time in the future".into())),
        _ if end > now + MAX_TIME => {
            Err(invalid("until", "until: expected a time within 366 days".into()))
        }
        end => Ok(end),
    }
}

fn read_time(value: &Value) -> Option<Millis> {
    let seconds = match value {
        Value::String(text) => text.parse::<jiff::Timestamp>().ok()?.as_second() as f64,
        value => value.as_f64()?,
    };
    (0.0..1e11).contains(&seconds).then(|| (seconds * 1_000.0).round() as Millis)
}

/// Warnings about valid but probably unintended orders.
fn warnings(order: &PrescaleOrder, tiers: &Tiers) -> Vec<String> {
    let (pool, pods) = (order.pool.as_tier_value(), order.pods);
    let max = tiers.bounds(&order.pool).max.filter(|max| pods > *max);
    max.map(|max| format!("the max of {pool} is {max}: the policy asks for {max} pods, not {pods}"))
        .into_iter()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Millis = 1_763_280_000_000;

    fn end(body: Value) -> Result<Millis, String> {
        let body: PrescaleBody = serde_json::from_value(body).unwrap();
        read_end(&body, NOW).map_err(|error| error.error)
    }

    #[test]
    fn an_invalid_pool_is_an_error_of_that_field() {
        for bad in ["", "a b", "merchant:"] {
            assert_eq!(
                read_pool(bad).unwrap_err().details,
                Some(json!({"field": "pool"})),
                "{bad}"
            );
        }
    }

    #[test]
    fn an_unknown_pool_is_compared_with_the_other_kind_of_that_name() {
        let table = r#"{"tiers": {"gold": {}, "bronze.x": {}}, "default_chain": ["gold"]}"#;
        let tiers = Tiers::parse(table, fleet::tiers::DocumentSource::Settings).unwrap().0;
        for (name, hint) in [
            ("bronze.x", "bronze.x is not in the tier table; expected merchant:bronze.x?"),
            ("merchant:gold", "merchant:gold is not in the tier table; expected gold?"),
            ("silver", "silver is not in the tier table"),
        ] {
            let error = not_found(&name.parse().unwrap(), &tiers);
            assert!(error.ends_with(hint), "{error}");
        }
    }

    #[test]
    fn the_end_of_an_order_is_a_time_or_a_duration() {
        assert_eq!(end(json!({"for": "4h"})), Ok(NOW + 4 * 3_600_000));
        assert_eq!(end(json!({"until": 1_763_280_060})), Ok(NOW + 60_000));
        assert_eq!(end(json!({"until": "2025-11-16T09:01:00+01:00"})), Ok(NOW + 60_000));
        for (bad, reason) in [
            (json!({}), "expected until"),
            (json!({"until": 5, "for": "5m"}), "not both"),
            (json!({"until": NOW / 1_000}), "in the future"),
            (json!({"until": NOW / 1_000 + 400 * 86_400}), "within 366 days"),
            (json!({"until": NOW}), "expected unix seconds"),
            (json!({"until": -1}), "expected unix seconds"),
            (json!({"until": "tomorrow"}), "expected unix seconds"),
            (json!({"until": [1]}), "expected unix seconds"),
            (json!({"until": true}), "expected unix seconds"),
            (json!({"for": "5 days"}), "expected a duration"),
        ] {
            let error = end(bad.clone()).unwrap_err();
            assert!(error.contains(reason), "{bad}: {error}");
        }
        assert_eq!(end(json!({"until": "2025-11-16T08:00:01Z", "for": ""})), Ok(NOW + 1_000));
    }
}
