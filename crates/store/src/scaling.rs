//! The operations of the scaler: fenced like all writes of the leader.

use crate::Reply;
use fleet::{
    Millis, PodWriter, Surplus, WriteRefused,
    names::{PodName, Pool},
};

/// The part of a store that the leader's scaler uses.
pub trait ScalingStore {
    /// Takes a surplus pod out of service for `ttl`, or returns it (`None`).
    fn set_surplus<'a>(
        &'a self,
        pod: &'a PodName,
        uid: &'a str,
        ttl: Option<Millis>,
        writer: PodWriter<'a>,
    ) -> Reply<'a, Result<Surplus, WriteRefused>>;

    /// Appends a change of a workload's replicas to the event log.
    fn record_scaling<'a>(
        &'a self,
        pool: &'a Pool,
        detail: &'a str,
        writer: PodWriter<'a>,
    ) -> Reply<'a, Result<(), WriteRefused>>;
}
