//! Settings of traces, by the names that OpenTelemetry gives them.

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
#[command(next_help_heading = "Traces (OpenTelemetry's variables)")]
pub struct TraceSettings {
    /// Collector that takes traces by OTLP over HTTP, http://host:4318 or https://. Unset: no traces
    #[arg(long, env, value_name = "URL", value_parser = collector_url)]
    pub otel_exporter_otlp_endpoint: Option<String>,

    /// The same, but the whole URL, its path included
    #[arg(long, env, value_name = "URL", value_parser = collector_url)]
    pub otel_exporter_otlp_traces_endpoint: Option<String>,

    /// Headers for the collector: name=value, separated by commas, values percent-encoded. A secret
    #[arg(long, env, value_name = "SECRETS")]
    pub otel_exporter_otlp_headers: Option<Secret>,

    /// Certificate authority of a collector with https://, besides the system's (PEM)
    #[arg(long, env, value_name = "PATH")]
    pub otel_exporter_otlp_certificate: Option<PathBuf>,

    /// Certificate to show to a collector that wants one (PEM)
    #[arg(long, env, value_name = "PATH", requires = "otel_exporter_otlp_client_key")]
    pub otel_exporter_otlp_client_certificate: Option<PathBuf>,

    /// The certificate's private key (PEM)
    #[arg(long, env, value_name = "PATH", requires = "otel_exporter_otlp_client_certificate")]
    pub otel_exporter_otlp_client_key: Option<PathBuf>,

    /// How the collector is spoken to: OTLP's JSON over HTTP, whichever of the two is named
    #[arg(long, env, value_name = "NAME", default_value = "http/json")]
    pub otel_exporter_otlp_protocol: String,

    /// No traces, whatever else is set: true
    #[arg(long, env, value_name = "BOOLEAN", default_value = "false", value_parser = boolean)]
    pub otel_sdk_disabled: bool,

    /// How long the collector may take to answer (milliseconds)
    #[arg(long, env, value_name = "NUMBER", default_value = "10000", value_parser = millis)]
    pub otel_exporter_otlp_timeout: u64,

    /// What this program is called in traces. Default: smart-router
    #[arg(long, env, value_name = "NAME")]
    pub otel_service_name: Option<String>,

    /// What else is said of it: name=value, separated by commas, values percent-encoded
    #[arg(long, env, value_name = "LIST")]
    pub otel_resource_attributes: Option<String>,

    /// Which traces are recorded
    #[arg(long, env, value_name = "NAME", default_value = "parentbased_always_on", value_parser = sampler)]
    pub otel_traces_sampler: String,

    /// The ratio of a traceidratio sampler, 0 to 1. Default: 1
    #[arg(long, env, value_name = "NUMBER", value_parser = ratio)]
    pub otel_traces_sampler_arg: Option<f64>,
}

/// JSON is sent either way: whoever takes one of these takes it on the same port.
const PROTOCOLS: [&str; 2] = ["http/json", "http/protobuf"];
const SERVICE: &str = "smart-router";
const PAIRS: &str = "name=value, separated by commas, values percent-encoded";

impl TraceSettings {
    /// What is recorded and where it goes; nothing without a collector. `identity` is
    /// that of this replica.
    pub fn config(&self, identity: &str) -> Result<Option<TraceConfig>, ConfigError> {
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
        let url = url_of(&url).expect("it was checked when it was read");
        let tls = self.tls(&url)?;
        let sampler = Sampler::named(&self.otel_traces_sampler, ratio);
        Ok(Some(TraceConfig {
            collector: Collector {
                url,
                tls,
                headers,
                patience: Duration::from_millis(self.otel_exporter_otlp_timeout),
            },
            sampler: sampler.expect("it was checked when it was read"),
            resource,
        }))
    }

    fn tls(&self, url: &Uri) -> Result<Option<Arc<ClientConfig>>, ConfigError> {
        let certificate = &self.otel_exporter_otlp_client_certificate;
        let trust = Trust {
            authority: self.otel_exporter_otlp_certificate.clone(),
            identity: certificate.clone().zip(self.otel_exporter_otlp_client_key.clone()),
        };
        let is_safe = url.scheme_str() == Some("https");
        let settings = is_safe.then(|| trust.settings()).transpose();
        settings.map_err(|wrong| {
            let file = path(&self.otel_exporter_otlp_certificate);
            let expected = format!("files that can be used; {wrong}");
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

    /// What is given counts before what we know ourselves; a name of its own before both.
    fn resource(&self, identity: &str) -> Result<Vec<(String, String)>, ConfigError> {
        let text = self.otel_resource_attributes.as_deref().unwrap_or_default();
        let mut resource =
            pairs(text).ok_or_else(|| ConfigError::new("OTEL_RESOURCE_ATTRIBUTES", text, PAIRS))?;
        if self.otel_service_name.is_some() {
            resource.retain(|(name, _)| name != "service.name");
        }
        for (name, value) in [
            ("service.name", self.otel_service_name.as_deref().unwrap_or(SERVICE)),
            ("service.version", env!("CARGO_PKG_VERSION")),
            ("service.instance.id", identity),
        ] {
            if !resource.iter().any(|(other, _)| other == name) {
                resource.push((name.into(), value.into()));
            }
        }
        Ok(resource)
    }

    /// What `check-config` prints.
    pub fn describe(&self) -> Vec<(&'static str, String)> {
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
            ("OTEL_SERVICE_NAME", self.otel_service_name.clone().unwrap_or(SERVICE.into())),
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

/// Where a collector is.
fn url_of(text: &str) -> Option<Uri> {
    let url: Uri = text.parse().ok()?;
    url.host().filter(|host| !host.is_empty())?;
    let is_known = matches!(url.scheme_str(), Some("http" | "https")) && !text.contains(['@', '#']);
    (is_known && url.query().is_none()).then_some(url)
}

fn collector_url(text: &str) -> Result<String, String> {
    let expected = || "a URL that begins with http:// or https:// and has no query".to_owned();
    url_of(text).map(|_| text.to_owned()).ok_or_else(expected)
}

/// As OpenTelemetry reads it: true is true, and all else is not.
fn boolean(text: &str) -> Result<bool, String> {
    Ok(text.eq_ignore_ascii_case("true"))
}

fn sampler(text: &str) -> Result<String, String> {
    let known = Sampler::named(text, 1.0);
    known.map(|_| text.to_owned()).ok_or_else(|| format!("one of {}", SAMPLERS.join(", ")))
}

fn millis(text: &str) -> Result<u64, String> {
    let number: Option<u64> = text.parse().ok();
    let sane = number.filter(|millis| (1..=600_000).contains(millis));
    sane.ok_or("milliseconds from 1 to 600000".into())
}

fn ratio(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok();
    number.filter(|ratio| (0.0..=1.0).contains(ratio)).ok_or("a number from 0 to 1".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_read_as_the_specification_writes_them() {
        let read = pairs(" a=1, b.c=x%2Cy%3D ,,d=").unwrap();
        let read: Vec<_> = read.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        assert_eq!(read, [("a", "1"), ("b.c", "x,y="), ("d", "")]);
        assert_eq!(pairs("a"), None);
        assert_eq!(pairs("=1"), None);
        assert_eq!(pairs("a=%ff"), None);
    }

    #[test]
    fn a_collector_is_reached_by_http() {
        for good in ["http://c:4318/a/v1", "http://[::1]", "https://c"] {
            assert!(url_of(good).is_some(), "{good}");
        }
        for bad in ["", "c:4318", "ftp://c", "http://", "http://c?a", "http://u:p@c"] {
            assert_eq!(url_of(bad), None, "{bad}");
        }
    }
}
