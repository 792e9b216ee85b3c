//! `/merchants/{id}`: what a merchant's calls may use.

use axum::{
    Json,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::{PartialSchema, ToSchema};

use super::etag::{self, IfMatch, guarded, tag};
use crate::http::{
    ApiError, Noted, Shared,
    middleware::{auth::By, body::JsonBody},
    openapi::{
        Endpoint, Group,
        schemas::{self, MerchantDocument},
    },
    reply::Named,
    webhooks::query::Query,
};
use fleet::{
    Edit, PoolStatus,
    merchant::{FIELDS, MerchantConfig},
    names::{MerchantId, Pool},
    tiers::Tiers,
};

#[derive(Serialize, ToSchema)]
struct Merchant {
    /// What stands there, which is text if somebody has put there by hand what is no JSON.
    document: Value,
    #[schema(value_type = schemas::MerchantId)]
    merchant_id: MerchantId,
}

#[derive(Serialize, ToSchema)]
pub struct Merchants {
    merchants: Vec<Merchant>,
    /// Where the next page begins.
    #[schema(required)]
    next: Option<String>,
}

#[derive(Serialize, ToSchema)]
struct MerchantChanged {
    #[schema(value_type = schemas::MerchantId)]
    merchant_id: MerchantId,
    success: bool,
    /// What may not be meant.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

impl MerchantChanged {
    fn new(merchant_id: MerchantId) -> Self {
        Self { merchant_id, success: true, warnings: Vec::new() }
    }
}

pub fn list_described() -> Endpoint {
    let merchant = Merchant { document: document(), merchant_id: acme() };
    Endpoint::new(Group::Settings, "All merchants, by name")
        .pages(100, 1_000)
        .gives(Merchants { merchants: vec![merchant], next: None })
        .asks_store()
}

pub fn get_described() -> Endpoint {
    of_merchant("The document of a merchant")
        .gives_some("application/json", schemas::object(), document())
        .fails_with(404, "It has none.", json!({"error": "merchant not found"}))
}

pub fn put_described() -> Endpoint {
    guarded(of_merchant("Gives a merchant a document"))
        .about("Its `fallback` must name tiers that are in force.")
        .takes::<MerchantDocument>(document())
        .gives(MerchantChanged {
            warnings: vec![empty_pool("merchant:acme")],
            ..MerchantChanged::new(acme())
        })
}

pub fn delete_described() -> Endpoint {
    let endpoint = guarded(of_merchant("Takes a merchant's document away"));
    endpoint.gives(MerchantChanged::new(acme())).fails_with(
        404,
        "It has none.",
        json!({"error": "merchant not found"}),
    )
}

fn of_merchant(summary: &str) -> Endpoint {
    Endpoint::new(Group::Settings, summary)
        .path("id", schemas::MerchantId::schema(), "acme")
        .fails(400, "The id is not one of a merchant.")
        .asks_store()
}

fn acme() -> MerchantId {
    "acme".parse().expect("a name")
}

fn document() -> Value {
    json!({"pool": "acme", "fallback": ["gold"], "max_calls": 200})
}

pub async fn list(State(context): Shared, query: Query) -> Result<Json<Merchants>, ApiError> {
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
            // What somebody has put there by hand may be no JSON at all.
            let document = serde_json::from_str(&document).unwrap_or_else(|_| json!(document));
            Merchant { document, merchant_id: id }
        })
        .collect();
    Ok(Json(Merchants { merchants, next }))
}

pub async fn get(
    State(context): Shared,
    Named(id): Named<MerchantId>,
) -> Result<Response, ApiError> {
    let document = context.store.merchant(&id).await?.ok_or_else(unknown)?;
    Ok((tag(&document), [(header::CONTENT_TYPE, "application/json")], document).into_response())
}

pub async fn put(
    State(context): Shared,
    Named(id): Named<MerchantId>,
    if_match: IfMatch,
    by: By,
    JsonBody(body): JsonBody<Value>,
) -> Result<Response, ApiError> {
    let document = body.to_string();
    let config = MerchantConfig::parse(&document)
        .map_err(|error| ApiError::bad_request(format!("not a merchant document: {error}")))?;
    let present = context.store.merchant(&id).await?;
    if_match.check(present.as_deref())?;
    let tiers = context.store.tiers().await?;
    if let Some(step) = config.unknown_tier(&tiers) {
        let error = format!("not a merchant document: fallback: there is no tier {step}");
        return Err(ApiError::bad_request(error));
    }
    let mut changed = MerchantChanged::new(id);
    let status = context.snapshots.status().await?;
    changed.warnings = doubts(&body, &config, &tiers, &status.pools);
    let edit =
        Edit { instead_of: Some(present.as_deref().unwrap_or_default()), by: &by.to_string() };
    let set = context.store.set_merchant(&changed.merchant_id, Some(&document), edit).await?;
    set.map_err(|_| etag::changed(StatusCode::CONFLICT))?;
    let noted = Noted { outcome: "merchant_set", ..Noted::default() };
    Ok(noted.on((tag(&document), Json(changed))))
}

pub async fn delete(
    State(context): Shared,
    Named(id): Named<MerchantId>,
    if_match: IfMatch,
    by: By,
) -> Result<Response, ApiError> {
    let present = context.store.merchant(&id).await?.ok_or_else(unknown)?;
    if_match.check(Some(&present))?;
    let edit = Edit { instead_of: Some(present.as_str()), by: &by.to_string() };
    let deleted = context.store.set_merchant(&id, None, edit).await?;
    deleted.map_err(|_| etag::changed(StatusCode::CONFLICT))?;
    let noted = Noted { outcome: "merchant_deleted", ..Noted::default() };
    Ok(noted.on(Json(MerchantChanged::new(id))))
}

/// What a document says that may not be meant.
fn doubts(
    body: &Value,
    config: &MerchantConfig,
    tiers: &Tiers,
    pools: &[PoolStatus],
) -> Vec<String> {
    let fields = body.as_object().into_iter().flat_map(Map::keys);
    let unknown = fields.filter(|field| !FIELDS.contains(&field.as_str()));
    let mut doubts: Vec<String> =
        unknown.map(|field| format!("there is no field {field:?}; it is left alone")).collect();
    if config.refuses_all() {
        doubts.push("dedicated_only without a pool refuses every call".into());
    }
    let has_pods =
        |pool: &Pool| pools.iter().any(|status| status.pool == *pool && status.assigned > 0);
    let empty = config.steps().filter_map(|step| tiers.resolve(step)).filter(|it| !has_pods(it));
    doubts.extend(empty.map(|pool| empty_pool(&pool.as_tier_value())));
    doubts
}

fn empty_pool(pool: &str) -> String {
    format!("the pool {pool} has no pods yet")
}

fn unknown() -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "merchant not found")
}
