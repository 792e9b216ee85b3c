//! Checks by external programs: a browser, the providers' SDKs, schemathesis, nginx, promtool,
//! Helm, kustomize, the schemas of Kubernetes, OpenTelemetry's protobuf messages, Autobahn's test
//! suite, the WebSocket stacks of agents, and the examples.

mod agent_stacks;
mod autobahn;
mod browser;
mod chart;
mod crds;
mod deploy;
mod examples;
mod image;
mod monitoring;
mod nginx;
mod openapi;
mod outbound;
mod pod_security;
mod provider_sdks;
mod redis_ha;
mod release;
mod render;
mod schemas;
mod traces;
mod tutorial;
