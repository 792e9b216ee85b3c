//! The JSON API, one file per endpoint.

pub(super) mod allocate;
pub(super) mod calls;
pub(super) mod capacity;
pub(super) mod dial_limits;
pub(super) mod dial_queues;
pub(super) mod drain;
pub(super) mod etag;
pub(super) mod events;
pub(crate) mod live;
pub(super) mod merchants;
pub(super) mod metrics;
pub(super) mod pod;
pub(super) mod pods;
pub(super) mod prescale;
pub(super) mod probes;
pub(super) mod release;
pub(super) mod renew;
mod reservation_use;
pub(super) mod reservations;
pub(crate) mod snapshots;
pub(super) mod status;
pub(super) mod tiers;
pub(super) mod whoami;

use axum::http::StatusCode;

use super::{ApiError, Context};

/// Refuses a change of what an object of the cluster manages, unless objects are not applied here.
fn managed_elsewhere(context: &Context, subject: &str, owner: &str) -> Result<(), ApiError> {
    if !context.honours_owners {
        return Ok(());
    }
    let error = format!(
        "{subject} managed by {owner}; make the change there, or remove the objects to use the API"
    );
    Err(ApiError::new(StatusCode::CONFLICT, error))
}
