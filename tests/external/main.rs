//! Checks by external programs: a browser, the providers' SDKs, schemathesis, nginx, promtool,
//! kustomize and OpenTelemetry's protobuf messages.

mod browser;
mod deploy;
mod nginx;
mod openapi;
mod provider_sdks;
mod traces;
