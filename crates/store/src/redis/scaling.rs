//! The operations of the scaler on Redis.

use super::{Redis, operations::unexpected};
use crate::{Reply, ScalingStore};
use fleet::{
    Millis, PodWriter, Surplus, WriteRefused,
    names::{PodName, Pool},
};

impl ScalingStore for Redis {
    fn set_surplus<'a>(
        &'a self,
        pod: &'a PodName,
        uid: &'a str,
        ttl: Option<Millis>,
        writer: PodWriter<'a>,
    ) -> Reply<'a, Result<Surplus, WriteRefused>> {
        Box::pin(async move {
            let (origin, epoch) = (writer.origin.to_string(), writer.epoch.to_string());
            let ttl = ttl.map(|ttl| ttl.to_string()).unwrap_or_default();
            let args = [&origin, &epoch, pod.as_str(), uid, &ttl];
            let mut reply = self.run(&self.functions().set_surplus, &args).await?;
            if let Some(refused) = self.write_refused(&mut reply, writer.epoch)? {
                return Ok(Err(refused));
            }
            Ok(Ok(match reply.word.as_str() {
                "drained" => Surplus::Drained { active_calls: reply.number()? as usize },
                "returned" => Surplus::Returned,
                "not_ours" => Surplus::NotOurs,
                "not_there" => Surplus::NotFound,
                _ => return Err(unexpected(&reply)),
            }))
        })
    }

    fn record_scaling<'a>(
        &'a self,
        pool: &'a Pool,
        detail: &'a str,
        writer: PodWriter<'a>,
    ) -> Reply<'a, Result<(), WriteRefused>> {
        Box::pin(async move {
            let (origin, epoch) = (writer.origin.to_string(), writer.epoch.to_string());
            let args = [&origin, &epoch, &pool.to_string(), detail];
            let mut reply = self.run(&self.functions().record_scaling, &args).await?;
            Ok(match self.write_refused(&mut reply, writer.epoch)? {
                Some(refused) => Err(refused),
                None => Ok(()),
            })
        })
    }
}
