//! Checks by external programs: a browser, the providers' SDKs, schemathesis, nginx, promtool,
//! kustomize, OpenTelemetry's protobuf messages, Autobahn's test suite and the WebSocket stacks of
//! agents.

mod agent_stacks;
mod autobahn;
mod browser;
mod deploy;
mod nginx;
mod openapi;
mod provider_sdks;
mod traces;
