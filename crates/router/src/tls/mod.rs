//! TLS of the listeners, reloaded when the files change, and of the program's own clients.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    ClientConfig, ConfigBuilder, ConfigSide, RootCertStore, ServerConfig, WantsVerifier,
    WantsVersions,
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::WebPkiClientVerifier,
};

use x509_cert::{
    certificate::{CertificateInner, Raw},
    der::Decode,
};

use crate::auth::secrets::Watched;

/// Files of the server certificate, its key, and the client authorities.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TlsConfig {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
    /// Authorities of client certificates; `None` if clients need none.
    pub(crate) client_authority: Option<PathBuf>,
}

/// The TLS server side, reloaded when its files change.
pub(crate) struct Tls(Watched<Configs>);

struct Configs {
    server_only: Arc<ServerConfig>,
    /// Requires client certificates; `None` without client authorities.
    mutual: Option<Arc<ServerConfig>>,
    /// Earliest end of validity in the certificate chain (unix seconds).
    ends_at: Option<u64>,
}

/// TLS of a listener.
#[derive(Clone)]
pub(crate) enum ListenerTls {
    Off,
    /// Clients need no certificate.
    ServerOnly(Arc<Tls>),
    /// Clients must present a certificate if client authorities are configured.
    Mutual(Arc<Tls>),
}

impl ListenerTls {
    /// Returns the configuration for the next connection; `None` without TLS.
    pub(crate) fn server_config(&self) -> Option<Arc<ServerConfig>> {
        match self {
            Self::Off => None,
            Self::ServerOnly(tls) => Some(tls.0.current().server_only.clone()),
            Self::Mutual(tls) => {
                let configs = tls.0.current();
                Some(configs.mutual.as_ref().unwrap_or(&configs.server_only).clone())
            }
        }
    }
}

impl Tls {
    /// Reads the files; the error names what was expected.
    pub(crate) fn new(config: &TlsConfig) -> Result<Self, String> {
        let mut paths = vec![config.certificate.clone(), config.key.clone()];
        paths.extend(config.client_authority.clone());
        Watched::files("TLS_CERT_FILE", paths, Arc::new(parse)).map(Self)
    }

    /// Reloads the files if they changed.
    pub(crate) fn reload_if_changed(&self) {
        self.0.reload_if_changed();
    }

    /// Returns the earliest end of validity in the certificate chain (unix seconds).
    pub(crate) fn ends_at(&self) -> Option<u64> {
        self.0.current().ends_at
    }
}

/// Parses the certificate chain, its key, and optionally the client authorities.
fn parse(texts: &[String]) -> Result<Configs, String> {
    let config = |authorities: Option<&String>| {
        let builder = ServerConfig::builder_with_provider(provider());
        let builder = versions(builder)?;
        let builder = match authorities {
            None => builder.with_no_client_auth(),
            Some(text) => {
                let roots = Arc::new(roots(text)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
                let verifier = verifier.build().map_err(|error| format!("authorities; {error}"))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let (chain, key) = (certificates(&texts[0])?, private_key(&texts[1])?);
        let mut config = builder
            .with_single_cert(chain, key)
            .map_err(|error| format!("a certificate and its key; {error}"))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok::<_, String>(Arc::new(config))
    };
    let mutual = texts.get(2).map(|authorities| config(Some(authorities))).transpose()?;
    let chain = certificates(&texts[0])?;
    let ends_at = chain.iter().filter_map(|it| not_after(it)).min();
    Ok(Configs { server_only: config(None)?, mutual, ends_at })
}

/// TLS settings of a client: the authorities it trusts and its certificate.
#[derive(Debug, Clone, Default)]
pub(crate) struct Trust {
    /// Authority to trust besides the system's.
    pub(crate) authority: Option<PathBuf>,
    /// The files of a certificate and its key.
    pub(crate) identity: Option<(PathBuf, PathBuf)>,
}

impl Trust {
    pub(crate) fn client_config(&self) -> Result<Arc<ClientConfig>, String> {
        let mut trusted = match &self.authority {
            Some(path) => roots(&text_of(path)?).map_err(|wrong| at(path, &wrong))?,
            None => RootCertStore::empty(),
        };
        trusted.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let builder = versions(ClientConfig::builder_with_provider(provider()))?;
        let builder = builder.with_root_certificates(trusted);
        let config = match &self.identity {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let chain = certificates(&text_of(certificate)?).map_err(|it| at(certificate, &it));
                let secret = private_key(&text_of(key)?).map_err(|wrong| at(key, &wrong));
                let config = builder.with_client_auth_cert(chain?, secret?);
                config.map_err(|error| {
                    at(certificate, &format!("a certificate that matches its key; {error}"))
                })?
            }
        };
        Ok(Arc::new(config))
    }
}

fn at(path: &Path, expected: &str) -> String {
    format!("{}: expected {expected}", path.display())
}

fn text_of(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

fn versions<S: ConfigSide>(
    builder: ConfigBuilder<S, WantsVersions>,
) -> Result<ConfigBuilder<S, WantsVerifier>, String> {
    builder.with_safe_default_protocol_versions().map_err(|error| error.to_string())
}

fn certificates(text: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text.as_bytes()).collect();
    let found = found.map_err(|error| format!("certificates (PEM); {error}"))?;
    if found.is_empty() { Err("at least one certificate (PEM)".into()) } else { Ok(found) }
}

/// The end of a certificate's validity, in seconds since 1970; `None` if it is not a
/// certificate. The raw profile leaves the rules of RFC 5280 to rustls, which accepted it.
fn not_after(der: &[u8]) -> Option<u64> {
    let certificate = CertificateInner::<Raw>::from_der(der).ok()?;
    Some(certificate.tbs_certificate().validity().not_after.to_unix_duration().as_secs())
}

/// The error contains no part of the key.
fn private_key(text: &str) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(text.as_bytes()).map_err(|_| "a private key (PEM)".into())
}

fn roots(text: &str) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(text)? {
        roots.add(certificate).map_err(|error| format!("authorities (PEM); {error}"))?;
    }
    Ok(roots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_malformed_certificate_has_no_end_of_validity() {
        for bad in [&[][..], &[0x30], &[0x30, 0x84, 1, 1, 1, 1], &[0x30, 3, 0x30, 1, 2], b"text"] {
            assert_eq!(not_after(bad), None, "{bad:?}");
        }
    }
}
