//! The router as its users see it: the real program, over real sockets.

mod support;

mod access;
mod agents;
mod allocate;
mod bad_input;
mod callbacks;
mod cluster;
mod config;
mod confirm;
mod cost;
mod deploy;
mod differential;
mod differential_mutations;
mod drain;
mod http;
mod journal;
mod judges;
mod leader;
mod limits;
mod load;
mod metrics;
mod nginx;
mod pods;
mod redis_connections;
mod redis_hands;
mod redis_odd;
mod redis_outages;
mod release;
mod renew;
mod rescue;
mod shared_redis;
mod signatures;
mod waiting;
mod waiting_odd;
mod webhooks;
