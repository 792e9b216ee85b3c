//! The keys of stream tokens: configured, or one that the replicas share through the store.

use std::{
    sync::{Arc, PoisonError, RwLock},
    time::{SystemTime, UNIX_EPOCH},
};

use aws_lc_rs::rand;

use crate::auth::Access;
use fleet::names::CallSid;
use media::token::{Claims, LIFETIME, TokenError, TokenKeys};
use store::{Store, StoreError};

/// Former keys of the store that still verify: a key changes only if the store loses it.
const MAX_FORMER: usize = 3;

pub(super) struct Keys {
    access: Arc<Access>,
    shared: RwLock<Shared>,
}

#[derive(Default)]
struct Shared {
    /// Keys of the store, the current one first.
    secrets: Vec<String>,
    /// Built from the secrets in force; `None` before the first is known.
    built: Option<Arc<Built>>,
}

/// The keys, and the secrets that they were built from.
struct Built {
    secrets: Vec<String>,
    keys: TokenKeys,
}

impl Keys {
    pub(super) fn new(access: Arc<Access>) -> Self {
        Self { access, shared: RwLock::default() }
    }

    pub(super) fn is_known(&self) -> bool {
        self.keys().is_some()
    }

    /// Reads the shared key from the store, or makes this process's the shared one. After the
    /// store has lost it, the replicas put the same one back.
    pub(super) async fn refresh(&self, store: &dyn Store) -> Result<(), StoreError> {
        if self.access.media_secrets().is_some() {
            return Ok(());
        }
        let known = self.read(|shared| shared.secrets.first().cloned());
        let candidate = known.clone().unwrap_or_else(random_secret);
        let current = store.media_secret(&candidate).await?;
        if known.as_ref() != Some(&current) {
            let mut shared = self.shared.write().unwrap_or_else(PoisonError::into_inner);
            shared.secrets.insert(0, current);
            shared.secrets.truncate(1 + MAX_FORMER);
        }
        Ok(())
    }

    fn read<T>(&self, read: impl FnOnce(&Shared) -> T) -> T {
        read(&self.shared.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The keys in force; `None` before the first is known.
    fn keys(&self) -> Option<Arc<Built>> {
        let secrets = match self.access.media_secrets() {
            Some(secrets) => secrets.iter().map(|it| it.expose().to_owned()).collect(),
            None => self.read(|shared| shared.secrets.clone()),
        };
        let built = self.read(|shared| shared.built.clone());
        if let Some(built) = built.filter(|built| built.secrets == secrets) {
            return Some(built);
        }
        let keys = TokenKeys::new(secrets.iter().map(String::as_bytes))?;
        let built = Arc::new(Built { secrets, keys });
        self.shared.write().unwrap_or_else(PoisonError::into_inner).built = Some(built.clone());
        Some(built)
    }

    pub(super) fn sign(&self, call: &CallSid, attempt: u32, path: &str) -> Option<String> {
        let expiry = unix_seconds() + LIFETIME;
        let claims = Claims { call: call.as_str(), attempt, expiry, path };
        Some(self.keys()?.keys.sign(&claims))
    }

    /// The pod attempt that a valid token names.
    pub(super) fn verify(&self, token: &str, call: &str, path: &str) -> Result<u32, TokenError> {
        let keys = self.keys().ok_or(TokenError::Wrong)?;
        keys.keys.verify(token, call, path, unix_seconds())
    }
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

fn random_secret() -> String {
    let mut bytes = [0; 32];
    rand::fill(&mut bytes).expect("the system provides random numbers");
    data_encoding::BASE64URL_NOPAD.encode(&bytes)
}
