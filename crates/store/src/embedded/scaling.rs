//! The operations of the scaler on the embedded store.

use super::Embedded;
use crate::{Reply, ScalingStore};
use fleet::{
    Millis, PodWriter, Surplus, WriteRefused,
    names::{PodName, Pool},
};

impl ScalingStore for Embedded {
    fn set_surplus<'a>(
        &'a self,
        pod: &'a PodName,
        uid: &'a str,
        ttl: Option<Millis>,
        writer: PodWriter<'a>,
    ) -> Reply<'a, Result<Surplus, WriteRefused>> {
        self.step("set_surplus", move |fleet, now| fleet.set_surplus(pod, uid, ttl, writer, now))
    }

    fn record_scaling<'a>(
        &'a self,
        pool: &'a Pool,
        detail: &'a str,
        writer: PodWriter<'a>,
    ) -> Reply<'a, Result<(), WriteRefused>> {
        self.step("record_scaling", move |fleet, _| fleet.record_scaling(pool, detail, writer))
    }
}
