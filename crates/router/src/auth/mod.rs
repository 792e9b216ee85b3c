//! Who may do what: the roles of API tokens, and the keys of providers.

pub mod secrets;

use std::{collections::BTreeMap, fmt, sync::Arc};

use self::secrets::{Followed, Source};
use telephony::{Dialect, Provider, Secret};

/// What the bearer of a token may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Look at everything.
    Viewer,
    /// Allocate, release, renew and drain.
    Agent,
    /// All of it.
    Admin,
}

impl Role {
    const ALL: [Self; 3] = [Self::Viewer, Self::Agent, Self::Admin];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Agent => "agent",
            Self::Admin => "admin",
        }
    }

    /// Whether this role may do what is a matter of `needed`.
    pub fn may(self, needed: Self) -> bool {
        self == needed || self == Self::Admin
    }
}

/// Someone with a token: the role, and which of the tokens it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bearer {
    pub role: Role,
    /// Counted from 1, in the order in which the tokens were given.
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
    /// Reads `role:token` entries. What is wrong is said without showing any.
    pub fn parse(text: &str) -> Result<Self, String> {
        const EXPECTED: &str =
            "role:token entries, separated by commas, with the roles viewer, agent or admin";
        let mut tokens: Vec<(Role, Secret)> = Vec::new();
        for (index, entry) in telephony::secrets::entries(text).enumerate() {
            let wrong = |what: &str| format!("{EXPECTED}; entry {} {what}", index + 1);
            let (role, token) = entry.split_once(':').ok_or_else(|| wrong("has no colon"))?;
            let role = Role::ALL.into_iter().find(|known| known.as_str() == role.trim());
            let role = role.ok_or_else(|| wrong("names no role"))?;
            let token = token.trim();
            if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(wrong("has no token of printable characters"));
            }
            if tokens.iter().any(|(_, other)| other.is(token)) {
                return Err(wrong("repeats a token"));
            }
            tokens.push((role, token.into()));
        }
        if tokens.is_empty() { Err(EXPECTED.into()) } else { Ok(Self(tokens)) }
    }

    /// Whose token this is. Every one is compared, in constant time.
    pub fn bearer(&self, given: &str) -> Option<Bearer> {
        let mut found = None;
        for (index, (role, token)) in self.0.iter().enumerate() {
            if token.is(given) {
                found = Some(Bearer { role: *role, number: index + 1 });
            }
        }
        found
    }
}

/// What the edge was told: keys and tokens, and where we are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AccessConfig {
    pub providers: BTreeMap<Provider, (&'static str, Source)>,
    pub api_tokens: Option<(&'static str, Source)>,
}

/// The keys and tokens in force.
#[derive(Default)]
pub struct Access {
    providers: BTreeMap<Provider, Followed<Vec<Secret>>>,
    tokens: Option<Followed<Tokens>>,
}

/// A source of secrets that can't be used: its variable, what may be shown of it,
/// and what was expected.
#[derive(Debug)]
pub struct BadSource {
    pub name: &'static str,
    pub shown: String,
    pub expected: String,
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
    pub fn new(config: &AccessConfig) -> Result<Self, BadSource> {
        let mut access = Self::default();
        for (provider, (name, source)) in &config.providers {
            let dialect: &'static dyn Dialect = provider.dialect();
            let read = Arc::new(move |text: &str| dialect.keys(text));
            let keys = Followed::new(name, source, read)
                .map_err(|expected| BadSource::new(name, source, expected))?;
            access.providers.insert(*provider, keys);
        }
        if let Some((name, source)) = &config.api_tokens {
            let tokens = Followed::new(name, source, Arc::new(Tokens::parse));
            access.tokens =
                Some(tokens.map_err(|expected| BadSource::new(name, source, expected))?);
        }
        Ok(access)
    }

    /// The keys of a provider; `None` if its webhooks are not checked.
    pub fn keys(&self, provider: Provider) -> Option<Arc<Vec<Secret>>> {
        self.providers.get(&provider).map(Followed::current)
    }

    /// The tokens; `None` if the API is open.
    pub fn tokens(&self) -> Option<Arc<Tokens>> {
        self.tokens.as_ref().map(Followed::current)
    }

    /// Looks at the files from which secrets came.
    pub fn look(&self) {
        self.providers.values().for_each(Followed::look);
        self.tokens.iter().for_each(Followed::look);
    }

    /// Warns of webhooks and an API that need no authentication.
    pub fn warn_if_unauthenticated(&self, served: &[Provider]) {
        let open: Vec<&str> = served
            .iter()
            .filter(|provider| !self.providers.contains_key(provider))
            .map(|provider| provider.as_str())
            .collect();
        if !open.is_empty() {
            let providers = open.join(", ");
            tracing::warn!(
                providers,
                "webhooks of these providers are not verified: set their secrets (TWILIO_AUTH_TOKEN and so on), or leave them out of PROVIDERS"
            );
        }
        if self.tokens.is_none() {
            tracing::warn!("the API is open to everyone who reaches it: set API_TOKENS");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_have_roles_and_several_may_share_one() {
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
    fn an_admin_may_do_all_and_the_others_what_is_theirs() {
        for role in Role::ALL {
            assert!(Role::Admin.may(role) && role.may(role));
        }
        assert!(!Role::Agent.may(Role::Viewer) && !Role::Viewer.may(Role::Agent));
        assert!(!Role::Agent.may(Role::Admin) && !Role::Viewer.may(Role::Admin));
    }
}
