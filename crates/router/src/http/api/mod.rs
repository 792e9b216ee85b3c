//! The JSON API, one file per endpoint.

pub mod allocate;
pub mod calls;
pub mod drain;
pub mod etag;
pub mod events;
pub mod live;
pub mod merchants;
pub mod metrics;
pub mod pod;
pub mod pods;
pub mod probes;
pub mod release;
pub mod renew;
pub mod snapshots;
pub mod status;
pub mod tiers;
pub mod whoami;
