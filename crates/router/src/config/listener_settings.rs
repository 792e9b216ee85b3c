//! Checks the settings of listeners, webhooks, TLS and access.

use std::net::{IpAddr, SocketAddr};

use super::{ConfigError, HttpConfig, ProcessRole, Settings, media_settings};
use crate::{
    auth::{Access, AccessConfig},
    tls::{Tls, TlsConfig},
};
use telephony::Provider;

pub(super) fn join(providers: &[Provider]) -> String {
    providers.iter().map(|provider| provider.as_str()).collect::<Vec<_>>().join(",")
}

pub(super) fn providers(settings: &Settings) -> Result<Vec<Provider>, ConfigError> {
    let Some(text) = &settings.edge.providers else { return Ok(Provider::ALL.into()) };
    let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
    let parsed = names.map(str::parse).collect::<Result<Vec<Provider>, _>>();
    parsed.ok().filter(|providers| !providers.is_empty()).ok_or_else(|| {
        ConfigError::new("PROVIDERS", text, format!("one or more of {}", join(&Provider::ALL)))
    })
}

pub(super) fn http(settings: &Settings, bind: IpAddr) -> Result<HttpConfig, ConfigError> {
    let http = &settings.http;
    Ok(HttpConfig {
        api: SocketAddr::new(bind, http.http_port),
        // Metrics are not public either.
        metrics: SocketAddr::new(
            settings.edge.admin_bind.map_or(bind, |admin| admin.ip()),
            http.metrics_port,
        ),
        admin: admin(settings, bind)?,
        read_timeout: http.http_read_timeout.0,
        idle_timeout: http.http_idle_timeout.0,
        max_connections: http.max_connections.get(),
        shutdown_timeout: http.http_shutdown_timeout.0,
    })
}

fn admin(settings: &Settings, bind: IpAddr) -> Result<Option<SocketAddr>, ConfigError> {
    let api = SocketAddr::new(bind, settings.http.http_port);
    match settings.edge.admin_bind {
        Some(admin) if admin == api && admin.port() != 0 => Err(ConfigError::new(
            "ADMIN_BIND",
            admin,
            format!("an address other than that of the webhooks, {api}"),
        )),
        admin => Ok(admin),
    }
}

/// Checks that every secret can be read, and that `PUBLIC_URL` is set if a setting needs it.
pub(super) fn access(settings: &Settings, role: ProcessRole) -> Result<AccessConfig, ConfigError> {
    let config = settings.secrets.access()?;
    Access::new(&config).map_err(|bad| ConfigError::new(bad.name, bad.shown, bad.expected))?;
    match role {
        ProcessRole::Router => check_public_url(settings, &config)?,
        // It serves no webhooks, and writes no URLs into documents.
        ProcessRole::Media => {}
    }
    Ok(config)
}

fn check_public_url(settings: &Settings, config: &AccessConfig) -> Result<(), ConfigError> {
    let signs_urls = config.providers.iter().find(|(provider, _)| provider.dialect().signs_urls());
    let needs_url = match signs_urls {
        Some((_, (name, _))) => Some(format!("{name} is set and its signatures cover the URL")),
        None if settings.calls.connect_timeout.is_some() && !media_settings::is_on(settings) => {
            Some("CONNECT_TIMEOUT is set".into())
        }
        None if settings.calls.hold_time.is_some() => Some("HOLD_TIME is set".into()),
        None if media_settings::retries(settings) > 0 && !media_settings::is_on(settings) => {
            Some("RETRY_ON_DISCONNECT is set".into())
        }
        None if media_settings::is_on(settings) => None,
        None => settings.calls.stream_status.then(|| "STREAM_STATUS is on".into()),
    };
    match (needs_url, &settings.edge.public_url) {
        (Some(reason), None) => Err(ConfigError::new(
            "PUBLIC_URL",
            "",
            format!("the URL under which providers reach this router, because {reason}"),
        )),
        _ => Ok(()),
    }
}

/// Checks that the TLS files are usable.
pub(super) fn tls(settings: &Settings) -> Result<Option<TlsConfig>, ConfigError> {
    let (certificate, key) = match (&settings.edge.tls_cert_file, &settings.edge.tls_key_file) {
        (Some(certificate), Some(key)) => (certificate.clone(), key.clone()),
        (Some(_), None) => {
            let expected = "the private key of TLS_CERT_FILE";
            return Err(ConfigError::new("TLS_KEY_FILE", "", expected));
        }
        (None, Some(path)) => {
            let expected = "TLS_CERT_FILE to be set as well";
            return Err(ConfigError::new("TLS_KEY_FILE", path.display(), expected));
        }
        (None, None) => match &settings.edge.tls_client_ca_file {
            None => return Ok(None),
            Some(path) => {
                let expected = "TLS_CERT_FILE and TLS_KEY_FILE to be set as well";
                return Err(ConfigError::new("TLS_CLIENT_CA_FILE", path.display(), expected));
            }
        },
    };
    let config =
        TlsConfig { certificate, key, client_authority: settings.edge.tls_client_ca_file.clone() };
    match Tls::new(&config) {
        Ok(_) => Ok(Some(config)),
        Err(expected) => {
            Err(ConfigError::new("TLS_CERT_FILE", config.certificate.display(), expected))
        }
    }
}
