//! The keys of stream tokens: configured, or one that the replicas share through the store.

use std::{
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard},
    time::{SystemTime, UNIX_EPOCH},
};

use aws_lc_rs::rand;

use crate::auth::Access;
use fleet::names::CallSid;
use media::token::{Claims, LIFETIME, TokenError, TokenKeys, Verified};
use store::{Store, StoreError};
use telephony::Secret;

/// Former keys of the store that still verify: a key changes only if the store loses it.
const MAX_FORMER: usize = 3;

pub(super) struct Keys {
    access: Arc<Access>,
    state: RwLock<State>,
}

#[derive(Default)]
struct State {
    /// Secrets of the store, the current one first.
    shared: Vec<String>,
    /// The configured secrets that the keys were made of, if any are.
    configured: Option<Arc<Vec<Secret>>>,
    /// `None` before the first secret is known.
    keys: Option<Arc<TokenKeys>>,
}

impl Keys {
    pub(super) fn new(access: Arc<Access>) -> Self {
        Self { access, state: RwLock::default() }
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
        let known = self.read().shared.first().cloned();
        let candidate = known.clone().unwrap_or_else(random_secret);
        let current = store.media_secret(&candidate).await?;
        if known.as_ref() != Some(&current) {
            let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
            state.shared.insert(0, current);
            state.shared.truncate(1 + MAX_FORMER);
            state.keys = TokenKeys::new(state.shared.iter().map(String::as_bytes)).map(Arc::new);
        }
        Ok(())
    }

    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The keys in force; `None` before the first is known.
    fn keys(&self) -> Option<Arc<TokenKeys>> {
        let configured = self.access.media_secrets();
        let Some(secrets) = configured else { return self.read().keys.clone() };
        {
            let state = self.read();
            if state.configured.as_ref().is_some_and(|known| Arc::ptr_eq(known, &secrets)) {
                return state.keys.clone();
            }
        }
        let keys = TokenKeys::new(secrets.iter().map(Secret::as_bytes)).map(Arc::new);
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        (state.configured, state.keys) = (Some(secrets), keys.clone());
        keys
    }

    pub(super) fn sign(
        &self,
        call: &CallSid,
        attempt: u32,
        path: &str,
        parameters: &str,
    ) -> Option<String> {
        let expiry = unix_seconds() + LIFETIME;
        let claims = Claims { call: call.as_str(), attempt, expiry, path, parameters };
        Some(self.keys()?.sign(&claims))
    }

    /// The content of a valid token.
    pub(super) fn verify<'t>(
        &self,
        token: &'t str,
        call: &str,
        path: &str,
    ) -> Result<Verified<'t>, TokenError> {
        let keys = self.keys().ok_or(TokenError::Wrong)?;
        keys.verify(token, call, path, unix_seconds())
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
