//! Authentication: API tokens with their roles, and the keys that verify webhooks.

pub(crate) mod secrets;

use std::{collections::BTreeMap, fmt, sync::Arc};

use self::secrets::{Source, Watched};
use telephony::{Dialect, Provider, Secret};

/// Permissions of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Read everything.
    Viewer,
    /// Allocate, release, renew and drain.
    Agent,
    /// Everything.
    Admin,
}

impl Role {
    const ALL: [Self; 3] = [Self::Viewer, Self::Agent, Self::Admin];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Agent => "agent",
            Self::Admin => "admin",
        }
    }

    /// Whether this role includes the permissions of `needed`.
    pub(crate) fn may(self, needed: Self) -> bool {
        self == needed || self == Self::Admin
    }
}

/// An authenticated client: its role and the number of its token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bearer {
    pub(crate) role: Role,
    /// Position in `API_TOKENS`, from 1.
    number: usize,
}

impl fmt::Display for Bearer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (token {})", self.role.as_str(), self.number)
    }
}

/// All tokens, with their roles.
#[derive(Debug, Clone)]
pub struct Tokens(Vec<(Role, Secret)>);

impl Tokens {
    /// Parses `role:token` entries. Errors show no token.
    pub fn parse(text: &str) -> Result<Self, String> {
        const EXPECTED: &str =
            "role:token entries, separated by commas, with the roles viewer, agent or admin";
        let mut tokens: Vec<(Role, Secret)> = Vec::new();
        for (index, entry) in telephony::secrets::entries(text).enumerate() {
            let wrong = |what: &str| format!("{EXPECTED}; entry {} {what}", index + 1);
            let (role, token) = entry.split_once(':').ok_or_else(|| wrong("has no colon"))?;
            let role = Role::ALL.into_iter().find(|known| known.as_str() == role.trim());
            let role = role.ok_or_else(|| wrong("has an unknown role"))?;
            let token = token.trim();
            if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(wrong("has no token of printable characters"));
            }
            if tokens.iter().any(|(_, other)| other.matches(token)) {
                return Err(wrong("repeats a token"));
            }
            tokens.push((role, token.into()));
        }
        if tokens.is_empty() { Err(EXPECTED.into()) } else { Ok(Self(tokens)) }
    }

    /// Returns the client with this token. Compares with every token, in constant time.
    pub fn bearer(&self, given: &str) -> Option<Bearer> {
        let mut found = None;
        for (index, (role, token)) in self.0.iter().enumerate() {
            if token.matches(given) {
                found = Some(Bearer { role: *role, number: index + 1 });
            }
        }
        found
    }
}

/// Shortest key of stream tokens: a shorter one can be guessed offline from a token.
const MIN_MEDIA_SECRET: usize = 16;

fn media_secrets(text: &str) -> Result<Vec<Secret>, String> {
    let secrets = telephony::secrets::list(text)?;
    match secrets.iter().all(|secret| secret.expose().len() >= MIN_MEDIA_SECRET) {
        true => Ok(secrets),
        false => Err(format!("secrets of at least {MIN_MEDIA_SECRET} characters")),
    }
}

/// Shortest secret in the URLs of streams without a webhook.
const MIN_CONNECT_SECRET: usize = 16;

/// Secrets that are a segment of a URL: no character of theirs needs an escape.
fn connect_secrets(text: &str) -> Result<Vec<Secret>, String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let secrets = telephony::secrets::list(text)?;
    let is_valid = |secret: &Secret| {
        secret.as_bytes().len() >= MIN_CONNECT_SECRET
            && secret.as_bytes().iter().all(|byte| is_plain(*byte))
    };
    match secrets.iter().all(is_valid) {
        true => Ok(secrets),
        false => Err(format!(
            "secrets of at least {MIN_CONNECT_SECRET} letters, digits, hyphens, dots, underscores or tildes"
        )),
    }
}

/// Sources of the provider keys and API tokens, with their variables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct AccessConfig {
    pub(crate) providers: BTreeMap<Provider, (&'static str, Source)>,
    pub(crate) api_tokens: Option<(&'static str, Source)>,
    /// Keys of stream tokens.
    pub(crate) media: Option<(&'static str, Source)>,
    /// Secrets in the URLs of streams without a webhook.
    pub(crate) connect: Option<(&'static str, Source)>,
}

/// The keys and tokens in force.
#[derive(Default)]
pub(crate) struct Access {
    providers: BTreeMap<Provider, Watched<Vec<Secret>>>,
    tokens: Option<Watched<Tokens>>,
    media: Option<Watched<Vec<Secret>>>,
    connect: Option<Watched<Vec<Secret>>>,
}

/// An unusable source of secrets: its variable, its printable part, and what was expected.
#[derive(Debug)]
pub(crate) struct BadSource {
    pub(crate) name: &'static str,
    pub(crate) shown: String,
    pub(crate) expected: String,
}

impl BadSource {
    fn new(name: &'static str, source: &Source, expected: String) -> Self {
        let shown = match source {
            Source::Text(_) => "(hidden)".into(),
            Source::File(path) => path.display().to_string(),
        };
        Self { name, shown, expected }
    }
}

impl Access {
    pub(crate) fn new(config: &AccessConfig) -> Result<Self, BadSource> {
        let mut access = Self::default();
        for (provider, (name, source)) in &config.providers {
            let dialect: &'static dyn Dialect = provider.dialect();
            let parse = Arc::new(move |text: &str| dialect.keys(text));
            let keys = Watched::new(name, source, parse)
                .map_err(|expected| BadSource::new(name, source, expected))?;
            access.providers.insert(*provider, keys);
        }
        if let Some((name, source)) = &config.api_tokens {
            let tokens = Watched::new(name, source, Arc::new(Tokens::parse));
            access.tokens =
                Some(tokens.map_err(|expected| BadSource::new(name, source, expected))?);
        }
        if let Some((name, source)) = &config.media {
            let secrets = Watched::new(name, source, Arc::new(media_secrets));
            access.media =
                Some(secrets.map_err(|expected| BadSource::new(name, source, expected))?);
        }
        if let Some((name, source)) = &config.connect {
            let secrets = Watched::new(name, source, Arc::new(connect_secrets));
            access.connect =
                Some(secrets.map_err(|expected| BadSource::new(name, source, expected))?);
        }
        Ok(access)
    }

    /// Returns the secrets in the URLs of streams without a webhook; `None` if there are none.
    pub(crate) fn connect_secrets(&self) -> Option<Arc<Vec<Secret>>> {
        self.connect.as_ref().map(Watched::current)
    }

    /// Returns the configured keys of stream tokens; `None` if the store keeps the key.
    pub(crate) fn media_secrets(&self) -> Option<Arc<Vec<Secret>>> {
        self.media.as_ref().map(Watched::current)
    }

    /// Returns the keys of a provider; `None` if its webhooks are not verified.
    pub(crate) fn keys(&self, provider: Provider) -> Option<Arc<Vec<Secret>>> {
        self.providers.get(&provider).map(Watched::current)
    }

    /// Returns the API tokens; `None` if the API needs no authentication.
    pub(crate) fn tokens(&self) -> Option<Arc<Tokens>> {
        self.tokens.as_ref().map(Watched::current)
    }

    /// Reloads secrets whose files changed.
    pub(crate) fn reload_if_changed(&self) {
        self.providers.values().for_each(Watched::reload_if_changed);
        self.tokens.iter().for_each(Watched::reload_if_changed);
        self.media.iter().for_each(Watched::reload_if_changed);
        self.connect.iter().for_each(Watched::reload_if_changed);
    }

    /// Logs a warning for webhooks and an API without authentication.
    pub(crate) fn warn_if_unauthenticated(&self, served: &[Provider]) {
        let open: Vec<&str> = served
            .iter()
            .filter(|provider| !self.providers.contains_key(provider))
            .map(|provider| provider.as_str())
            .collect();
        if !open.is_empty() {
            let providers = open.join(", ");
            tracing::warn!(
                providers,
                "webhooks of these providers are not verified: set their secrets (such as TWILIO_AUTH_TOKEN), or leave them out of PROVIDERS"
            );
        }
        if self.tokens.is_none() {
            tracing::warn!(
                "the API needs no authentication and is open to every client: set API_TOKENS"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_tokens_may_have_the_same_role() {
        let tokens = Tokens::parse("agent:a1, agent:a2\nviewer:v:1,admin:x").unwrap();
        let role = |token| tokens.bearer(token).map(|bearer| bearer.role);
        assert_eq!(role("a1"), Some(Role::Agent));
        assert_eq!(role("a2"), Some(Role::Agent));
        assert_eq!(role("v:1"), Some(Role::Viewer));
        assert_eq!(role("x"), Some(Role::Admin));
        for unknown in ["", "a", "a11", "agent:a1", "A1"] {
            assert_eq!(role(unknown), None, "{unknown}");
        }
        assert_eq!(tokens.bearer("a2").unwrap().to_string(), "agent (token 2)");
    }

    #[test]
    fn bad_entries_are_refused_without_being_shown() {
        for bad in ["", ",", "secret", "root:secret", "admin:", "admin:a b", "admin:x,agent:x"] {
            let error = Tokens::parse(bad).unwrap_err();
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn connect_secrets_are_long_and_need_no_escape_in_a_url() {
        let secrets = connect_secrets("0123456789abcdef, A-._~6789abcdef0").unwrap();
        assert_eq!(secrets.len(), 2);
        for bad in [
            "",
            "0123456789abcde",
            "0123456789abcdef,short",
            "0123456789/abcdef",
            "0123456789%2Fabcdef",
        ] {
            let error = connect_secrets(bad).unwrap_err();
            assert!(bad.is_empty() || !error.contains(bad), "{error}");
        }
    }

    #[test]
    fn admin_includes_every_role_and_the_others_only_themselves() {
        for role in Role::ALL {
            assert!(Role::Admin.may(role) && role.may(role));
        }
        assert!(!Role::Agent.may(Role::Viewer) && !Role::Viewer.may(Role::Agent));
        assert!(!Role::Agent.may(Role::Admin) && !Role::Viewer.may(Role::Admin));
    }
}
