//! The use of a reservation by an allocate request: metrics, and warnings for the caller.

use crate::http::Context;
use fleet::{Allocation, Refusal, ReservationUse, names::ReservationId};
use store::StoreError;
use telephony::CallRequest;

const NOT_OUTSTANDING: &str =
    "the reservation was used, has expired, was given back or never existed; the call has none";
const OTHER_MERCHANT: &str = "the reservation belongs to another merchant; the call has none";

/// Counts the use of a reservation. Returns the warning for a call that names one in vain.
pub(super) fn record_use(
    context: &Context,
    request: &CallRequest,
    outcome: &Result<Result<Allocation, Refusal>, StoreError>,
) -> Option<&'static str> {
    let named = request.reservation.as_ref()?;
    let effect = match outcome {
        Ok(Ok(allocation)) if allocation.was_existing => return None,
        Ok(Ok(allocation)) => allocation.reservation.as_ref(),
        Ok(Err(refusal)) => refusal.reservation.as_ref(),
        Err(_) => return None,
    };
    let is_valid = named.parse::<ReservationId>().is_ok();
    let warning = match effect {
        Some(ReservationUse::Used { .. }) => {
            let is_served = matches!(outcome, Ok(Ok(_)));
            context.metrics.outbound.ended(if is_served { "answered" } else { "missed" });
            if !is_served {
                tracing::warn!(
                    call_sid = %request.call, reservation = %named,
                    "an answered dial found no pod; it waits before all others, or is refused"
                );
            }
            return None;
        }
        // The first request was counted as missed.
        Some(ReservationUse::Repeated { .. }) => return None,
        Some(ReservationUse::OtherMerchant) => OTHER_MERCHANT,
        Some(ReservationUse::Unknown) => NOT_OUTSTANDING,
        None if is_valid => return None,
        None => NOT_OUTSTANDING,
    };
    context.metrics.outbound.ended("unknown");
    tracing::warn!(call_sid = %request.call, reservation = %named, "{warning}");
    Some(warning)
}
