//! Settings of secrets: each is a variable or a file.

use std::path::PathBuf;

use clap::Args;

use super::ConfigError;
use crate::auth::{AccessConfig, secrets::Source};
use telephony::{Provider, Secret};

/// The secrets as given.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Secrets")]
pub(crate) struct SecretSettings {
    /// Auth tokens that verify Twilio's webhooks, separated by commas. Unset: not verified
    #[arg(long, env, value_name = "SECRETS")]
    pub(crate) twilio_auth_token: Option<Secret>,

    /// File with TWILIO_AUTH_TOKEN, separated by commas or lines; reloaded when it changes
    #[arg(long, env, value_name = "PATH")]
    pub(crate) twilio_auth_token_file: Option<PathBuf>,

    /// Auth tokens that verify Plivo's webhooks, those of the main account included, separated by
    /// commas. Unset: not verified
    #[arg(long, env, value_name = "SECRETS")]
    pub(crate) plivo_auth_token: Option<Secret>,

    /// File with PLIVO_AUTH_TOKEN, separated by commas or lines; reloaded when it changes
    #[arg(long, env, value_name = "PATH")]
    pub(crate) plivo_auth_token_file: Option<PathBuf>,

    /// Secrets, one of which Exotel's webhooks must have in the query as auth_token, separated by
    /// commas. Unset: not verified
    #[arg(long, env, value_name = "SECRETS")]
    pub(crate) exotel_auth_token: Option<Secret>,

    /// File with EXOTEL_AUTH_TOKEN, separated by commas or lines; reloaded when it changes
    #[arg(long, env, value_name = "PATH")]
    pub(crate) exotel_auth_token_file: Option<PathBuf>,

    /// Signing keys that verify SignalWire's webhooks, separated by commas. Unset: not verified
    #[arg(long, env, value_name = "SECRETS")]
    pub(crate) signalwire_auth_token: Option<Secret>,

    /// File with SIGNALWIRE_AUTH_TOKEN, separated by commas or lines; reloaded when it changes
    #[arg(long, env, value_name = "PATH")]
    pub(crate) signalwire_auth_token_file: Option<PathBuf>,

    /// Public keys (Base64) that verify Telnyx's webhooks, separated by commas. Unset: not
    /// verified
    #[arg(long, env, value_name = "SECRETS")]
    pub(crate) telnyx_public_key: Option<Secret>,

    /// File with TELNYX_PUBLIC_KEY, separated by commas or lines; reloaded when it changes
    #[arg(long, env, value_name = "PATH")]
    pub(crate) telnyx_public_key_file: Option<PathBuf>,

    /// Signature secrets that verify Vonage's webhooks, separated by commas. Unset: not verified
    #[arg(long, env, value_name = "SECRETS")]
    pub(crate) vonage_signature_secret: Option<Secret>,

    /// File with VONAGE_SIGNATURE_SECRET, separated by commas or lines; reloaded when it changes
    #[arg(long, env, value_name = "PATH")]
    pub(crate) vonage_signature_secret_file: Option<PathBuf>,

    /// Webhook secrets that verify jambonz's webhooks, separated by commas. Unset: not verified
    #[arg(long, env, value_name = "SECRETS")]
    pub(crate) jambonz_webhook_secret: Option<Secret>,

    /// File with JAMBONZ_WEBHOOK_SECRET, separated by commas or lines; reloaded when it changes
    #[arg(long, env, value_name = "PATH")]
    pub(crate) jambonz_webhook_secret_file: Option<PathBuf>,

    /// Keys of the tokens in stream URLs, separated by commas; the first signs, all verify. Unset:
    /// a key is created once and kept in the store
    #[arg(long, env, value_name = "SECRETS")]
    pub(crate) media_secret: Option<Secret>,

    /// File with MEDIA_SECRET, separated by commas or lines; reloaded when it changes
    #[arg(long, env, value_name = "PATH")]
    pub(crate) media_secret_file: Option<PathBuf>,

    /// Secrets, one of which the URLs of streams without a webhook must have
    /// (/connect/{provider}/{secret}), separated by commas; at least 16 letters, digits, hyphens,
    /// dots, underscores or tildes. Unset: only streams of providers that sign handshakes, if their
    /// secret is set
    #[arg(long, env, value_name = "SECRETS")]
    pub(crate) connect_secret: Option<Secret>,

    /// File with CONNECT_SECRET, separated by commas or lines; reloaded when it changes
    #[arg(long, env, value_name = "PATH")]
    pub(crate) connect_secret_file: Option<PathBuf>,

    /// Tokens of the API as role:token, separated by commas; the roles are viewer, agent and
    /// admin. Unset: the API needs no authentication
    #[arg(long, env, value_name = "SECRETS")]
    pub(crate) api_tokens: Option<Secret>,

    /// File with API_TOKENS, separated by commas or lines; reloaded when it changes
    #[arg(long, env, value_name = "PATH")]
    pub(crate) api_tokens_file: Option<PathBuf>,
}

/// A variable for secrets, and the variable for their file.
struct Pair<'a> {
    name: &'static str,
    file_name: &'static str,
    text: &'a Option<Secret>,
    file: &'a Option<PathBuf>,
    of: SecretOf,
}

/// The use of a secret.
#[derive(Clone, Copy)]
enum SecretOf {
    Webhooks(Provider),
    StreamTokens,
    StreamUrls,
    Api,
}

impl SecretSettings {
    fn pairs(&self) -> [Pair<'_>; 10] {
        macro_rules! pair {
            ($name:literal, $text:ident, $file:ident, $of:expr) => {
                Pair {
                    name: $name,
                    file_name: concat!($name, "_FILE"),
                    text: &self.$text,
                    file: &self.$file,
                    of: $of,
                }
            };
        }
        [
            pair!(
                "TWILIO_AUTH_TOKEN",
                twilio_auth_token,
                twilio_auth_token_file,
                SecretOf::Webhooks(Provider::Twilio)
            ),
            pair!(
                "PLIVO_AUTH_TOKEN",
                plivo_auth_token,
                plivo_auth_token_file,
                SecretOf::Webhooks(Provider::Plivo)
            ),
            pair!(
                "EXOTEL_AUTH_TOKEN",
                exotel_auth_token,
                exotel_auth_token_file,
                SecretOf::Webhooks(Provider::Exotel)
            ),
            pair!(
                "SIGNALWIRE_AUTH_TOKEN",
                signalwire_auth_token,
                signalwire_auth_token_file,
                SecretOf::Webhooks(Provider::SignalWire)
            ),
            pair!(
                "TELNYX_PUBLIC_KEY",
                telnyx_public_key,
                telnyx_public_key_file,
                SecretOf::Webhooks(Provider::Telnyx)
            ),
            pair!(
                "VONAGE_SIGNATURE_SECRET",
                vonage_signature_secret,
                vonage_signature_secret_file,
                SecretOf::Webhooks(Provider::Vonage)
            ),
            pair!(
                "JAMBONZ_WEBHOOK_SECRET",
                jambonz_webhook_secret,
                jambonz_webhook_secret_file,
                SecretOf::Webhooks(Provider::Jambonz)
            ),
            pair!("MEDIA_SECRET", media_secret, media_secret_file, SecretOf::StreamTokens),
            pair!("CONNECT_SECRET", connect_secret, connect_secret_file, SecretOf::StreamUrls),
            pair!("API_TOKENS", api_tokens, api_tokens_file, SecretOf::Api),
        ]
    }

    /// Returns the source of each secret; fails if both variables of a pair are set.
    pub(super) fn access(&self) -> Result<AccessConfig, ConfigError> {
        let mut config = AccessConfig::default();
        for pair in self.pairs() {
            let given = match (pair.text, pair.file) {
                (None, None) => continue,
                (Some(text), None) => (pair.name, Source::Text(text.clone())),
                (None, Some(path)) => (pair.file_name, Source::File(path.clone())),
                (Some(_), Some(path)) => {
                    let expected = format!("either {} or {}, not both", pair.name, pair.file_name);
                    return Err(ConfigError::new(pair.file_name, path.display(), expected));
                }
            };
            match pair.of {
                SecretOf::Webhooks(provider) => drop(config.providers.insert(provider, given)),
                SecretOf::StreamTokens => config.media = Some(given),
                SecretOf::StreamUrls => config.connect = Some(given),
                SecretOf::Api => config.api_tokens = Some(given),
            }
        }
        Ok(config)
    }

    /// Returns what `check-config` prints: whether a secret is set, never its value.
    pub(super) fn describe(&self) -> Vec<(&'static str, String)> {
        let shown = |pair: Pair<'_>| {
            let text = if pair.text.is_some() { "(hidden)" } else { "" };
            let path = pair.file.as_ref().map(|path| path.display().to_string());
            [(pair.name, text.to_owned()), (pair.file_name, path.unwrap_or_default())]
        };
        self.pairs().into_iter().flat_map(shown).collect()
    }
}
