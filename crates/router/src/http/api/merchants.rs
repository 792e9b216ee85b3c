//! `/merchants` and `/merchants/{id}`: merchant documents.

use axum::{
    Json,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::{PartialSchema, ToSchema};

use super::{
    etag::{self, IfMatch, conditional, etag},
    managed_elsewhere,
};
use crate::http::{
    ApiError, Context, RequestLog, Shared,
    middleware::{auth::Caller, body::JsonBody},
    openapi::{
        Endpoint, Group,
        schemas::{self, MerchantDocument},
    },
    reply::PathName,
    webhooks::query::Query,
};
use fleet::{
    Edit, PoolStatus,
    manifests::owner_of,
    merchant::{FIELDS, MerchantConfig},
    names::{MerchantId, Pool},
    tiers::{MANAGED_BY, Tiers},
};

#[derive(Serialize, ToSchema)]
struct Merchant {
    /// The document; a string if the stored text is not JSON.
    document: Value,
    #[schema(value_type = schemas::MerchantId)]
    merchant_id: MerchantId,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Merchants {
    merchants: Vec<Merchant>,
    /// Cursor of the next page.
    #[schema(required)]
    next: Option<String>,
}

#[derive(Serialize, ToSchema)]
struct MerchantChanged {
    #[schema(value_type = schemas::MerchantId)]
    merchant_id: MerchantId,
    success: bool,
    /// Likely mistakes in the document.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

impl MerchantChanged {
    fn new(merchant_id: MerchantId) -> Self {
        Self { merchant_id, success: true, warnings: Vec::new() }
    }
}

pub(crate) fn list_endpoint() -> Endpoint {
    let merchant = Merchant { document: document(), merchant_id: acme() };
    Endpoint::new(Group::Settings, "List merchants by id")
        .paginated(100, 1_000)
        .responds(Merchants { merchants: vec![merchant], next: None })
        .uses_store()
}

pub(crate) fn get_endpoint() -> Endpoint {
    merchant_endpoint("Get the document of a merchant")
        .responds_untyped("application/json", schemas::object(), document())
        .error_with(404, "The merchant has no document.", json!({"error": "merchant not found"}))
}

pub(crate) fn put_endpoint() -> Endpoint {
    conditional(merchant_endpoint("Set the document of a merchant"))
        .description("Each tier in `fallback` must exist.")
        .json_body::<MerchantDocument>(document())
        .responds(MerchantChanged {
            warnings: vec![empty_pool("merchant:acme")],
            ..MerchantChanged::new(acme())
        })
}

pub(crate) fn delete_endpoint() -> Endpoint {
    let endpoint = conditional(merchant_endpoint("Delete the document of a merchant"));
    endpoint.responds(MerchantChanged::new(acme())).error_with(
        404,
        "The merchant has no document.",
        json!({"error": "merchant not found"}),
    )
}

fn merchant_endpoint(summary: &str) -> Endpoint {
    Endpoint::new(Group::Settings, summary)
        .path_param("id", schemas::MerchantId::schema(), "acme")
        .error(400, "The merchant id is invalid.")
        .uses_store()
}

fn acme() -> MerchantId {
    "acme".parse().expect("a name")
}

fn document() -> Value {
    json!({"pool": "acme", "fallback": ["gold"], "max_calls": 200})
}

pub(crate) async fn list(
    State(context): Shared,
    query: Query,
) -> Result<Json<Merchants>, ApiError> {
    query.only(&["limit", "cursor"])?;
    let limit = query.limit(100, 1_000)?;
    let after = query.cursor(&[])?.map(|id| id.parse::<MerchantId>()).transpose()?;
    let mut found = context.store.merchants(after.as_ref(), limit + 1).await?;
    let is_more = found.len() > limit;
    found.truncate(limit);
    let next = found.last().filter(|_| is_more).map(|(id, _)| query.next(&[], id.as_str()));
    let merchants = found
        .into_iter()
        .map(|(id, document)| {
            // A manual edit of the store may have left text that is not JSON.
            let document = serde_json::from_str(&document).unwrap_or_else(|_| json!(document));
            Merchant { document, merchant_id: id }
        })
        .collect();
    Ok(Json(Merchants { merchants, next }))
}

pub(crate) async fn get(
    State(context): Shared,
    PathName(id): PathName<MerchantId>,
) -> Result<Response, ApiError> {
    let document = context.store.merchant(&id).await?.ok_or_else(unknown)?;
    Ok((etag(&document), [(header::CONTENT_TYPE, "application/json")], document).into_response())
}

pub(crate) async fn put(
    State(context): Shared,
    PathName(id): PathName<MerchantId>,
    if_match: IfMatch,
    caller: Caller,
    JsonBody(body): JsonBody<Value>,
) -> Result<Response, ApiError> {
    let document = body.to_string();
    let config = MerchantConfig::parse(&document)
        .map_err(|error| ApiError::bad_request(format!("not a merchant document: {error}")))?;
    if body.get(MANAGED_BY).is_some() {
        let error = format!("not a merchant document: the router itself sets {MANAGED_BY}");
        return Err(ApiError::bad_request(error));
    }
    let current = context.store.merchant(&id).await?;
    if_match.check(current.as_deref())?;
    check_owner(&context, current.as_deref())?;
    let tiers = context.store.tiers().await?;
    if let Some(step) = config.unknown_tier(&tiers) {
        let error = format!("not a merchant document: fallback: unknown tier {step}");
        return Err(ApiError::bad_request(error));
    }
    let mut changed = MerchantChanged::new(id);
    let status = context.snapshots.status().await?;
    changed.warnings = document_warnings(&body, &config, &tiers, &status.pools);
    let edit =
        Edit { expected: Some(current.as_deref().unwrap_or_default()), by: &caller.to_string() };
    let set = context.store.set_merchant(&changed.merchant_id, Some(&document), edit).await?;
    set.map_err(|_| etag::conflict(StatusCode::CONFLICT))?;
    let log = RequestLog { outcome: "merchant_set", ..RequestLog::default() };
    Ok(log.attach((etag(&document), Json(changed))))
}

pub(crate) async fn delete(
    State(context): Shared,
    PathName(id): PathName<MerchantId>,
    if_match: IfMatch,
    caller: Caller,
) -> Result<Response, ApiError> {
    let current = context.store.merchant(&id).await?.ok_or_else(unknown)?;
    if_match.check(Some(&current))?;
    check_owner(&context, Some(&current))?;
    let edit = Edit { expected: Some(current.as_str()), by: &caller.to_string() };
    let deleted = context.store.set_merchant(&id, None, edit).await?;
    deleted.map_err(|_| etag::conflict(StatusCode::CONFLICT))?;
    let log = RequestLog { outcome: "merchant_deleted", ..RequestLog::default() };
    Ok(log.attach(Json(MerchantChanged::new(id))))
}

/// Warnings about valid but probably unintended settings.
fn document_warnings(
    body: &Value,
    config: &MerchantConfig,
    tiers: &Tiers,
    pools: &[PoolStatus],
) -> Vec<String> {
    let fields = body.as_object().into_iter().flat_map(Map::keys);
    let unknown = fields.filter(|field| !FIELDS.contains(&field.as_str()));
    let mut warnings: Vec<String> =
        unknown.map(|field| format!("unknown field {field:?} is ignored")).collect();
    if config.refuses_all() {
        warnings.push("dedicated_only without a pool refuses every call".into());
    }
    let has_pods =
        |pool: &Pool| pools.iter().any(|status| status.pool == *pool && status.assigned > 0);
    let empty = config.steps().filter_map(|step| tiers.resolve(step)).filter(|it| !has_pods(it));
    warnings.extend(empty.map(|pool| empty_pool(&pool.as_tier_value())));
    warnings
}

fn empty_pool(pool: &str) -> String {
    format!("the pool {pool} has no pods yet")
}

/// Refuses to change a document that an object of the cluster manages.
fn check_owner(context: &Context, current: Option<&str>) -> Result<(), ApiError> {
    match current.and_then(owner_of) {
        Some(owner) => managed_elsewhere(context, "the merchant is", &owner),
        None => Ok(()),
    }
}

fn unknown() -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "merchant not found")
}
