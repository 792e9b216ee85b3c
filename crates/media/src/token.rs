//! Stream tokens: proof in the URL of a stream that this router allocated the call.
//!
//! A token is `{attempt}.{expiry}.{mac}`. The MAC covers call, pod attempt, expiry and path,
//! so that a token opens one stream of one allocation at one path, for ten minutes.

use std::fmt::Write;

use aws_lc_rs::{constant_time::verify_slices_are_equal, hmac};
use data_encoding::BASE64URL_NOPAD;

/// How long (s) a token is valid.
pub const LIFETIME: u64 = 600;
/// Bytes of the MAC that the token carries: 128 bits.
const MAC_LEN: usize = 16;
/// Longest token: ten digits of attempt, twenty of expiry, 22 characters of MAC, two dots.
const MAX_LEN: usize = 54;

/// Content of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claims<'a> {
    pub call: &'a str,
    /// Ordinal of the pod that the call was given; 0 where it is not counted.
    pub attempt: u32,
    /// End of validity (Unix seconds).
    pub expiry: u64,
    /// Path behind the token, as the agent sees it.
    pub path: &'a str,
}

/// Why a token is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    #[error("malformed token")]
    Malformed,
    #[error("wrong token")]
    Wrong,
    #[error("expired token")]
    Expired,
}

/// Keys of the tokens: the first signs, all verify, so that keys can be rotated.
pub struct TokenKeys {
    keys: Vec<hmac::Key>,
}

impl TokenKeys {
    /// Keys made of secrets; `None` without any.
    pub fn new<'a>(secrets: impl IntoIterator<Item = &'a [u8]>) -> Option<Self> {
        let key = |secret| hmac::Key::new(hmac::HMAC_SHA256, secret);
        let keys: Vec<_> = secrets.into_iter().map(key).collect();
        (!keys.is_empty()).then_some(Self { keys })
    }

    pub fn sign(&self, claims: &Claims<'_>) -> String {
        let mac = mac(&self.keys[0], claims);
        let mut token = String::with_capacity(MAX_LEN);
        let _ = write!(token, "{}.{}.", claims.attempt, claims.expiry);
        BASE64URL_NOPAD.encode_append(&mac.as_ref()[..MAC_LEN], &mut token);
        token
    }

    /// The attempt that a token names, if it is valid for this call and path at `now` (Unix
    /// seconds). Compares in constant time.
    pub fn verify(&self, token: &str, call: &str, path: &str, now: u64) -> Result<u32, TokenError> {
        if token.len() > MAX_LEN {
            return Err(TokenError::Malformed);
        }
        let mut parts = token.split('.');
        let (Some(attempt), Some(expiry), Some(given), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(TokenError::Malformed);
        };
        let number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if !number(attempt) || !number(expiry) {
            return Err(TokenError::Malformed);
        }
        let attempt = attempt.parse().map_err(|_| TokenError::Malformed)?;
        let expiry = expiry.parse().map_err(|_| TokenError::Malformed)?;
        let given = BASE64URL_NOPAD.decode(given.as_bytes()).map_err(|_| TokenError::Malformed)?;
        let claims = Claims { call, attempt, expiry, path };
        let is_right =
            |key| verify_slices_are_equal(&mac(key, &claims).as_ref()[..MAC_LEN], &given).is_ok();
        // Every key is tried, so that the time does not tell which one matches.
        if self.keys.iter().filter(|key| is_right(key)).count() == 0 {
            return Err(TokenError::Wrong);
        }
        if now > expiry { Err(TokenError::Expired) } else { Ok(attempt) }
    }
}

/// The parts are separated by a byte that none of them contains.
fn mac(key: &hmac::Key, claims: &Claims<'_>) -> hmac::Tag {
    let mut context = hmac::Context::with_key(key);
    context.update(claims.call.as_bytes());
    context.update(&[0]);
    context.update(&claims.attempt.to_be_bytes());
    context.update(&claims.expiry.to_be_bytes());
    context.update(claims.path.as_bytes());
    context.sign()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLAIMS: Claims<'_> = Claims { call: "CA1", attempt: 2, expiry: 1_000, path: "/a/b" };

    fn keys(secrets: &[&str]) -> TokenKeys {
        TokenKeys::new(secrets.iter().map(|secret| secret.as_bytes())).unwrap()
    }

    #[test]
    fn a_token_is_valid_for_its_call_path_and_time() {
        let keys = keys(&["k"]);
        let token = keys.sign(&CLAIMS);
        assert_eq!(keys.verify(&token, "CA1", "/a/b", 1_000), Ok(2));
        assert_eq!(keys.verify(&token, "CA1", "/a/b", 1_001), Err(TokenError::Expired));
        assert_eq!(keys.verify(&token, "CA2", "/a/b", 1), Err(TokenError::Wrong));
        assert_eq!(keys.verify(&token, "CA1", "/a/b/", 1), Err(TokenError::Wrong));
        assert_eq!(keys.verify(&token, "CA1", "", 1), Err(TokenError::Wrong));
    }

    #[test]
    fn every_changed_character_is_noticed() {
        let keys = keys(&["k"]);
        let token = keys.sign(&CLAIMS);
        for at in 0..token.len() {
            for other in ["0", "A", ".", "-"] {
                let mut changed = token.clone();
                changed.replace_range(at..=at, other);
                if changed != token {
                    assert!(keys.verify(&changed, "CA1", "/a/b", 1).is_err(), "{changed}");
                }
            }
        }
    }

    #[test]
    fn keys_are_rotated() {
        let token = keys(&["old"]).sign(&CLAIMS);
        assert_eq!(keys(&["new", "old"]).verify(&token, "CA1", "/a/b", 1), Ok(2));
        assert_eq!(keys(&["new"]).verify(&token, "CA1", "/a/b", 1), Err(TokenError::Wrong));
    }

    #[test]
    fn malformed_tokens_are_refused() {
        let keys = keys(&["k"]);
        let long = format!("1.1000.{}", "A".repeat(100));
        for token in ["", ".", "..", "a.b.c", "1.2", "1.2.3.4", "+1.1000.AAAA", "1.-1.AAAA", &long]
        {
            assert_eq!(keys.verify(token, "CA1", "/a/b", 1), Err(TokenError::Malformed), "{token}");
        }
        assert!(TokenKeys::new([]).is_none());
    }
}
