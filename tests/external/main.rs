//! The router judged by other programs: a browser, the providers' SDKs, schemathesis, nginx,
//! promtool, kustomize and OpenTelemetry's own messages.

mod browser;
mod deploy;
mod judges;
mod nginx;
mod openapi;
mod traces;
