//! The JSON API, one file per endpoint.

pub mod allocate;
pub mod calls;
pub mod capacity;
pub mod dial_limits;
pub mod dial_queues;
pub mod drain;
pub mod etag;
pub mod events;
pub mod live;
pub mod merchants;
pub mod metrics;
pub mod pod;
pub mod pods;
pub mod prescale;
pub mod probes;
pub mod release;
pub mod renew;
mod reservation_use;
pub mod reservations;
pub mod snapshots;
pub mod status;
pub mod tiers;
pub mod whoami;

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
