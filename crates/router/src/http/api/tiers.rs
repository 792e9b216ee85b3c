//! `/tiers`: the tier table in force.

use axum::{
    Json,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::etag::{IfMatch, changed, guarded, tag};
use crate::http::{
    ApiError, Context, Noted, Shared,
    middleware::{auth::By, body::JsonBody},
    openapi::{
        Endpoint, Group,
        schemas::{self, TierDocument},
    },
    webhooks::query::Query,
};
use fleet::{
    self, Edit, PodStatus,
    merchant::MerchantConfig,
    names::{PodName, Pool},
    tiers::{Kind, Origin, Tiers},
};

/// What a table would change, or has changed.
#[derive(Serialize, ToSchema)]
struct Applied {
    /// Of a `dry_run`: the pods that would move.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    moves: Option<Vec<Moving>>,
    /// Not of a `dry_run`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    success: Option<bool>,
    #[schema(value_type = TierDocument)]
    tiers: Tiers,
    warnings: Vec<String>,
}

#[derive(Serialize, ToSchema)]
struct Moving {
    #[schema(required)]
    from: Option<String>,
    /// It moves when its calls are over.
    is_busy: bool,
    #[schema(value_type = schemas::PodName)]
    pod_name: PodName,
    #[schema(required)]
    to: Option<String>,
}

pub fn get_described() -> Endpoint {
    Endpoint::new(Group::Settings, "The tiers in force")
        .gives_some("application/json", schemas::tier_document(), example())
        .knows::<TierDocument>()
        .asks_store()
}

pub fn put_described() -> Endpoint {
    let tiers = serde_json::from_value(example()).expect("a tier document");
    let endpoint = Endpoint::new(Group::Settings, "Puts tiers in force")
        .query("dry_run", schemas::one_of(&["true", "false", ""]), "Only says what would move.")
        .takes::<TierDocument>(example())
        .gives(Applied { moves: None, success: Some(true), tiers, warnings: Vec::new() })
        .asks_store();
    guarded(endpoint).fails(
        409,
        "No tier would take some of the pods, or somebody else changed it in the same moment.",
    )
}

fn example() -> Value {
    json!({
        "tiers": {
            "gold": {"type": "exclusive", "target": 2},
            "basic": {"type": "shared", "target": 1, "max_concurrent": 5, "strategy": "spread"},
        },
        "default_chain": ["gold", "basic"],
    })
}

pub async fn get(State(context): Shared) -> Result<Response, ApiError> {
    let tiers = context.snapshots.tiers().await?;
    Ok((tag(&text_of(&tiers)), Json(&*tiers)).into_response())
}

fn text_of(tiers: &Tiers) -> String {
    Value::from(tiers.clone()).to_string()
}

/// As many merchants are looked at.
const MERCHANTS: usize = 1_000;

/// Merchants whose chains name tiers that a table does not have.
async fn left_behind(context: &Context, tiers: &Tiers) -> Result<Option<String>, ApiError> {
    let merchants = context.store.merchants(None, MERCHANTS).await?;
    let is_left = |document: &str| {
        MerchantConfig::parse(document).is_ok_and(|it| it.unknown_tier(tiers).is_some())
    };
    let left = merchants.iter().filter(|(_, document)| is_left(document));
    let names: Vec<&str> = left.map(|(id, _)| id.as_str()).collect();
    let shown = names.iter().take(5).copied().collect::<Vec<_>>().join(", ");
    Ok((!names.is_empty()).then(|| {
        format!("{} merchants name tiers that would be gone, such as {shown}", names.len())
    }))
}

/// Pods that have more calls than they could have in a table.
fn overfull(tiers: &Tiers, pods: &[PodStatus]) -> Option<String> {
    let is_overfull = |pod: &&PodStatus| {
        let cap = pod.pool.as_ref().and_then(|pool| tiers.kind(pool)).map(Kind::cap);
        cap.is_some_and(|cap| pod.calls.len() > cap as usize)
    };
    let count = pods.iter().filter(is_overfull).count();
    let pods = if count == 1 { "pod has" } else { "pods have" };
    (count > 0).then(|| {
        format!("{count} {pods} more calls than would be allowed: they go on, and new ones come when there is room")
    })
}

/// Puts a table in force, or says what that would move.
pub async fn put(
    State(context): Shared,
    query: Query,
    if_match: IfMatch,
    by: By,
    JsonBody(body): JsonBody<Value>,
) -> Result<Response, ApiError> {
    query.only(&["dry_run"])?;
    let is_dry_run = query.flag("dry_run")?;
    let (tiers, mut warnings) = Tiers::parse(&body.to_string(), Origin::Settings)
        .map_err(|error| ApiError::bad_request(format!("not a tier document: {error}")))?;
    let present = context.store.tiers().await?;
    if_match.check(Some(&text_of(&present)))?;
    let pods = context.snapshots.pods().await?;
    let moves = fleet::moves(&tiers, &pods);
    let busy = moves.iter().filter(|it| it.is_busy && it.to.is_some()).count();
    if busy > 0 {
        let (pods, their) = if busy == 1 { ("pod moves", "its") } else { ("pods move", "their") };
        warnings.push(format!("{busy} busy {pods} when {their} calls are over"));
    }
    warnings.extend(overfull(&tiers, &pods));
    let stranded: Vec<&str> =
        moves.iter().filter(|it| it.to.is_none()).map(|it| it.pod.as_str()).collect();
    if !stranded.is_empty() {
        let shown = stranded.iter().take(5).copied().collect::<Vec<_>>().join(", ");
        let error = format!("no tier would take {} pods, such as {shown}", stranded.len());
        return Err(ApiError::new(StatusCode::CONFLICT, error));
    }
    warnings.extend(left_behind(&context, &tiers).await?);
    if is_dry_run {
        let tier = |pool: &Option<Pool>| pool.as_ref().map(Pool::as_tier_value);
        let moves = moves.iter().map(|it| Moving {
            from: tier(&it.from),
            is_busy: it.is_busy,
            pod_name: it.pod.clone(),
            to: tier(&it.to),
        });
        let moves = Some(moves.collect());
        return Ok(Json(Applied { moves, success: None, tiers, warnings }).into_response());
    }
    let edit = Edit { instead_of: Some(&present), by: &by.to_string() };
    let applied = context.store.apply_tiers(&tiers, edit).await?;
    applied.map_err(|_| changed(StatusCode::CONFLICT))?;
    context.nudge.notify_one();
    let noted = Noted { outcome: "tiers_applied", ..Noted::default() };
    let tag = tag(&text_of(&tiers));
    Ok(noted.on((tag, Json(Applied { moves: None, success: Some(true), tiers, warnings }))))
}
