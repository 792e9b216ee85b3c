//! Settings of traces, by their OpenTelemetry names.

use std::{path::PathBuf, sync::Arc, time::Duration};

use axum::http::{HeaderName, HeaderValue, Uri};
use clap::Args;
use percent_encoding::percent_decode_str;
use rustls::ClientConfig;

use super::ConfigError;
use crate::{
    telemetry::traces::{Collector, TraceConfig},
    tls::Trust,
};
use spans::{SAMPLERS, Sampler};
use telephony::Secret;

/// The settings of traces as given.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Traces")]
pub(crate) struct TraceSettings {
    /// Collector that accepts traces by OTLP over HTTP, http://host:4318 or https://; /v1/traces is
    /// appended. Unset: no traces
    #[arg(long, env, value_name = "URL", value_parser = collector_url)]
    pub(crate) otel_exporter_otlp_endpoint: Option<String>,

    /// Full URL of the collector, path included; takes precedence over
    /// OTEL_EXPORTER_OTLP_ENDPOINT
    #[arg(long, env, value_name = "URL", value_parser = collector_url)]
    pub(crate) otel_exporter_otlp_traces_endpoint: Option<String>,

    /// Headers of requests to the collector: name=value, separated by commas, values
    /// percent-encoded. The value is a secret
    #[arg(long, env, value_name = "SECRETS")]
    pub(crate) otel_exporter_otlp_headers: Option<Secret>,

    /// Certificate authority to trust for a collector with https://, besides the system's (PEM);
    /// read at the start
    #[arg(long, env, value_name = "PATH")]
    pub(crate) otel_exporter_otlp_certificate: Option<PathBuf>,

    /// Client certificate, if the collector requires one (PEM); read at the start
    #[arg(long, env, value_name = "PATH", requires = "otel_exporter_otlp_client_key")]
    pub(crate) otel_exporter_otlp_client_certificate: Option<PathBuf>,

    /// Private key of OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE (PEM); read at the start
    #[arg(long, env, value_name = "PATH", requires = "otel_exporter_otlp_client_certificate")]
    pub(crate) otel_exporter_otlp_client_key: Option<PathBuf>,

    /// Protocol of the export. JSON over HTTP is sent for both values, which collectors accept on
    /// the same port; grpc is refused
    #[arg(long, env, value_name = "http/json|http/protobuf", default_value = "http/json")]
    pub(crate) otel_exporter_otlp_protocol: String,

    /// Disable traces, whatever else is set; values other than true count as false
    #[arg(long, env, value_name = "true|false", default_value = "false", value_parser = boolean)]
    pub(crate) otel_sdk_disabled: bool,

    /// How long a request to the collector may take, in milliseconds
    #[arg(long, env, value_name = "1..600000", default_value = "10000", value_parser = millis)]
    pub(crate) otel_exporter_otlp_timeout: u64,

    /// Service name in traces. Default: service.name of OTEL_RESOURCE_ATTRIBUTES, else smart-router
    #[arg(long, env, value_name = "NAME")]
    pub(crate) otel_service_name: Option<String>,

    /// Resource attributes in traces: name=value, separated by commas, values percent-encoded
    #[arg(long, env, value_name = "LIST")]
    pub(crate) otel_resource_attributes: Option<String>,

    /// Sampler: always_on, always_off or traceidratio, each also with the prefix parentbased_,
    /// which follows the decision of a parent span
    #[arg(
        long,
        env,
        value_name = "NAME",
        default_value = "parentbased_always_on",
        value_parser = sampler
    )]
    pub(crate) otel_traces_sampler: String,

    /// Ratio of a traceidratio sampler. Default: 1
    #[arg(long, env, value_name = "0..1", value_parser = ratio)]
    pub(crate) otel_traces_sampler_arg: Option<f64>,
}

/// JSON is sent for both: collectors accept it on the same port.
const PROTOCOLS: [&str; 2] = ["http/json", "http/protobuf"];
const SERVICE_NAME: &str = "smart-router";
const PAIRS: &str = "name=value, separated by commas, values percent-encoded";

impl TraceSettings {
    /// Returns the configuration of traces; `None` without a collector. `identity` is that of this
    /// replica.
    pub(super) fn config(&self, identity: &str) -> Result<Option<TraceConfig>, ConfigError> {
        let headers = self.headers()?;
        let resource = self.resource(identity)?;
        let ratio = self.otel_traces_sampler_arg.unwrap_or(1.0);
        let url =
            match (&self.otel_exporter_otlp_traces_endpoint, &self.otel_exporter_otlp_endpoint) {
                (Some(url), _) => url.clone(),
                (None, Some(base)) => format!("{}/v1/traces", base.trim_end_matches('/')),
                (None, None) => return Ok(None),
            };
        if self.otel_sdk_disabled {
            return Ok(None);
        }
        let protocol = &self.otel_exporter_otlp_protocol;
        if !PROTOCOLS.contains(&protocol.as_str()) {
            let expected = PROTOCOLS.join(" or ");
            return Err(ConfigError::new("OTEL_EXPORTER_OTLP_PROTOCOL", protocol, expected));
        }
        let url = parse_url(&url).expect("checked by the value parser");
        let tls = self.tls(&url)?;
        let sampler = Sampler::named(&self.otel_traces_sampler, ratio);
        Ok(Some(TraceConfig {
            collector: Collector {
                url,
                tls,
                headers,
                timeout: Duration::from_millis(self.otel_exporter_otlp_timeout),
            },
            sampler: sampler.expect("checked by the value parser"),
            resource,
        }))
    }

    fn tls(&self, url: &Uri) -> Result<Option<Arc<ClientConfig>>, ConfigError> {
        let certificate = &self.otel_exporter_otlp_client_certificate;
        let trust = Trust {
            authority: self.otel_exporter_otlp_certificate.clone(),
            identity: certificate.clone().zip(self.otel_exporter_otlp_client_key.clone()),
        };
        let is_tls = url.scheme_str() == Some("https");
        let config = is_tls.then(|| trust.client_config()).transpose();
        config.map_err(|error| {
            let file = path(&self.otel_exporter_otlp_certificate);
            let expected = format!("usable certificate files; {error}");
            ConfigError::new("OTEL_EXPORTER_OTLP_CERTIFICATE", file, expected)
        })
    }

    fn headers(&self) -> Result<Vec<(HeaderName, HeaderValue)>, ConfigError> {
        let text = self.otel_exporter_otlp_headers.as_ref().map_or("", |secret| secret.expose());
        let header = |(name, value): (String, String)| {
            let mut value: HeaderValue = value.parse().ok()?;
            value.set_sensitive(true);
            Some((name.parse::<HeaderName>().ok()?, value))
        };
        let headers = pairs(text).and_then(|pairs| pairs.into_iter().map(header).collect());
        headers.ok_or_else(|| ConfigError::new("OTEL_EXPORTER_OTLP_HEADERS", "(hidden)", PAIRS))
    }

    /// Given attributes take precedence over the defaults; `OTEL_SERVICE_NAME` over both.
    fn resource(&self, identity: &str) -> Result<Vec<(String, String)>, ConfigError> {
        let text = self.otel_resource_attributes.as_deref().unwrap_or_default();
        let mut resource =
            pairs(text).ok_or_else(|| ConfigError::new("OTEL_RESOURCE_ATTRIBUTES", text, PAIRS))?;
        if self.otel_service_name.is_some() {
            resource.retain(|(name, _)| name != "service.name");
        }
        for (name, value) in [
            ("service.name", self.otel_service_name.as_deref().unwrap_or(SERVICE_NAME)),
            ("service.version", env!("CARGO_PKG_VERSION")),
            ("service.instance.id", identity),
        ] {
            if !resource.iter().any(|(other, _)| other == name) {
                resource.push((name.into(), value.into()));
            }
        }
        Ok(resource)
    }

    /// Returns what `check-config` prints.
    pub(super) fn describe(&self) -> Vec<(&'static str, String)> {
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        let hidden = if self.otel_exporter_otlp_headers.is_some() { "(hidden)" } else { "" };
        let ratio = self.otel_traces_sampler_arg.map(|ratio| ratio.to_string());
        vec![
            ("OTEL_EXPORTER_OTLP_ENDPOINT", text(&self.otel_exporter_otlp_endpoint)),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", text(&self.otel_exporter_otlp_traces_endpoint)),
            ("OTEL_EXPORTER_OTLP_HEADERS", hidden.into()),
            ("OTEL_EXPORTER_OTLP_CERTIFICATE", path(&self.otel_exporter_otlp_certificate)),
            (
                "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE",
                path(&self.otel_exporter_otlp_client_certificate),
            ),
            ("OTEL_EXPORTER_OTLP_CLIENT_KEY", path(&self.otel_exporter_otlp_client_key)),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", self.otel_exporter_otlp_protocol.clone()),
            ("OTEL_SDK_DISABLED", self.otel_sdk_disabled.to_string()),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", self.otel_exporter_otlp_timeout.to_string()),
            ("OTEL_SERVICE_NAME", self.otel_service_name.clone().unwrap_or(SERVICE_NAME.into())),
            ("OTEL_RESOURCE_ATTRIBUTES", text(&self.otel_resource_attributes)),
            ("OTEL_TRACES_SAMPLER", self.otel_traces_sampler.clone()),
            ("OTEL_TRACES_SAMPLER_ARG", ratio.unwrap_or_default()),
        ]
    }
}

fn path(path: &Option<PathBuf>) -> String {
    path.as_ref().map(|path| path.display().to_string()).unwrap_or_default()
}

/// `a=b,c=d`, values percent-encoded.
fn pairs(text: &str) -> Option<Vec<(String, String)>> {
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    let pair = |part: &str| {
        let (name, value) = part.split_once('=')?;
        let value = percent_decode_str(value.trim()).decode_utf8().ok()?;
        Some((name.trim().to_owned(), value.into_owned())).filter(|(name, _)| !name.is_empty())
    };
    parts.map(pair).collect()
}

/// Parses the URL of a collector.
fn parse_url(text: &str) -> Option<Uri> {
    let url: Uri = text.parse().ok()?;
    url.host().filter(|host| !host.is_empty())?;
    let is_valid = matches!(url.scheme_str(), Some("http" | "https")) && !text.contains(['@', '#']);
    (is_valid && url.query().is_none()).then_some(url)
}

fn collector_url(text: &str) -> Result<String, String> {
    let expected = || "a URL that begins with http:// or https:// and has no query".to_owned();
    parse_url(text).map(|_| text.to_owned()).ok_or_else(expected)
}

/// OpenTelemetry's rule: every value other than true is false.
fn boolean(text: &str) -> Result<bool, String> {
    Ok(text.eq_ignore_ascii_case("true"))
}

fn sampler(text: &str) -> Result<String, String> {
    let sampler = Sampler::named(text, 1.0);
    sampler.map(|_| text.to_owned()).ok_or_else(|| format!("one of {}", SAMPLERS.join(", ")))
}

fn millis(text: &str) -> Result<u64, String> {
    let number: Option<u64> = text.parse().ok();
    let valid = number.filter(|millis| (1..=600_000).contains(millis));
    valid.ok_or("milliseconds from 1 to 600000".into())
}

fn ratio(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok();
    number.filter(|ratio| (0.0..=1.0).contains(ratio)).ok_or("a number from 0 to 1".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_parsed_by_the_specification() {
        let read = pairs(" a=1, b.c=x%2Cy%3D ,,d=").unwrap();
        let read: Vec<_> = read.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        assert_eq!(read, [("a", "1"), ("b.c", "x,y="), ("d", "")]);
        assert_eq!(pairs("a"), None);
        assert_eq!(pairs("=1"), None);
        assert_eq!(pairs("a=%ff"), None);
    }

    #[test]
    fn the_url_of_a_collector_has_http_or_https_and_no_query() {
        for good in ["http://c:4318/a/v1", "http://[::1]", "https://c"] {
            assert!(parse_url(good).is_some(), "{good}");
        }
        for bad in ["", "c:4318", "ftp://c", "http://", "http://c?a", "http://u:p@c"] {
            assert_eq!(parse_url(bad), None, "{bad}");
        }
    }
}
