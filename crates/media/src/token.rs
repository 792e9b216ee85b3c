//! Stream tokens: proof in the URL of a stream that this router allocated the call.
//!
//! A token is `{attempt}.{expiry}.{mac}`, and `{attempt}.{expiry}.{mac}.{parameters}` for a call
//! with parameters. The MAC covers call, pod attempt, expiry, path and parameters, so that a token
//! opens one stream at a time of one call at one path, for ten minutes.

use std::fmt::Write;

use aws_lc_rs::{constant_time::verify_slices_are_equal, hmac};
use data_encoding::BASE64URL_NOPAD;

/// How long (s) a token is valid.
pub const LIFETIME: u64 = 600;
/// Bytes of the MAC that the token carries: 128 bits.
const MAC_LEN: usize = 16;
/// Longest token without parameters: ten digits of attempt, twenty of expiry, 22 characters of
/// MAC, two dots.
const MAX_LEN: usize = 54;
/// Longest parameters (bytes) in a token.
pub const MAX_PARAMETERS: usize = 768;

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
    /// Parameters of the call as text of the alphabet of URL-safe base64; empty without any.
    pub parameters: &'a str,
}

/// Content of a valid token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verified<'a> {
    pub attempt: u32,
    pub parameters: &'a str,
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
        let mut token = String::with_capacity(MAX_LEN + 1 + claims.parameters.len());
        let _ = write!(token, "{}.{}.", claims.attempt, claims.expiry);
        BASE64URL_NOPAD.encode_append(&mac.as_ref()[..MAC_LEN], &mut token);
        if !claims.parameters.is_empty() {
            token.extend([".", claims.parameters]);
        }
        token
    }

    /// The content of a token, if it is valid for this call and path at `now` (Unix seconds).
    /// Compares in constant time.
    pub fn verify<'t>(
        &self,
        token: &'t str,
        call: &str,
        path: &str,
        now: u64,
    ) -> Result<Verified<'t>, TokenError> {
        let mut parts = token.splitn(4, '.');
        let (Some(attempt), Some(expiry), Some(given), parameters) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(TokenError::Malformed);
        };
        // An empty part would be a second form of the token without parameters.
        if parameters.is_some_and(str::is_empty) {
            return Err(TokenError::Malformed);
        }
        let parameters = parameters.unwrap_or_default();
        if parameters.len() > MAX_PARAMETERS || token.len() > MAX_LEN + 1 + parameters.len() {
            return Err(TokenError::Malformed);
        }
        // One text per number: a second form of a token would open a stream as well.
        let is_number = |text: &str| {
            text.bytes().all(|byte| byte.is_ascii_digit())
                && (text == "0" || !text.starts_with('0'))
        };
        if !is_number(attempt) || !is_number(expiry) {
            return Err(TokenError::Malformed);
        }
        let attempt = attempt.parse().map_err(|_| TokenError::Malformed)?;
        let expiry = expiry.parse().map_err(|_| TokenError::Malformed)?;
        let given = BASE64URL_NOPAD.decode(given.as_bytes()).map_err(|_| TokenError::Malformed)?;
        let claims = Claims { call, attempt, expiry, path, parameters };
        let is_right =
            |key| verify_slices_are_equal(&mac(key, &claims).as_ref()[..MAC_LEN], &given).is_ok();
        // Every key is tried, so that the time does not tell which one matches.
        if self.keys.iter().filter(|key| is_right(key)).count() == 0 {
            return Err(TokenError::Wrong);
        }
        match now > expiry {
            true => Err(TokenError::Expired),
            false => Ok(Verified { attempt, parameters }),
        }
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
    if !claims.parameters.is_empty() {
        context.update(&[0]);
        context.update(claims.parameters.as_bytes());
    }
    context.sign()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLAIMS: Claims<'_> =
        Claims { call: "CA1", attempt: 2, expiry: 1_000, path: "/a/b", parameters: "" };
    const VALID: Result<Verified<'_>, TokenError> = Ok(Verified { attempt: 2, parameters: "" });

    fn keys(secrets: &[&str]) -> TokenKeys {
        TokenKeys::new(secrets.iter().map(|secret| secret.as_bytes())).unwrap()
    }

    #[test]
    fn a_token_is_valid_for_its_call_path_and_time() {
        let keys = keys(&["k"]);
        let token = keys.sign(&CLAIMS);
        assert_eq!(keys.verify(&token, "CA1", "/a/b", 1_000), VALID);
        assert_eq!(keys.verify(&token, "CA1", "/a/b", 1_001), Err(TokenError::Expired));
        assert_eq!(keys.verify(&token, "CA2", "/a/b", 1), Err(TokenError::Wrong));
        assert_eq!(keys.verify(&token, "CA1", "/a/b/", 1), Err(TokenError::Wrong));
        assert_eq!(keys.verify(&token, "CA1", "", 1), Err(TokenError::Wrong));
    }

    #[test]
    fn every_changed_character_is_noticed() {
        let keys = keys(&["k"]);
        for parameters in ["", "bmFtZT1B"] {
            let token = keys.sign(&Claims { parameters, ..CLAIMS });
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
    }

    #[test]
    fn parameters_are_part_of_the_token() {
        let keys = keys(&["k"]);
        let longest = "A".repeat(MAX_PARAMETERS);
        for parameters in ["bmFtZT1B", &longest] {
            let token = keys.sign(&Claims { parameters, ..CLAIMS });
            let expected = Ok(Verified { attempt: 2, parameters });
            assert_eq!(keys.verify(&token, "CA1", "/a/b", 1), expected);
            let (without, _) = token.rsplit_once('.').unwrap();
            assert_eq!(keys.verify(without, "CA1", "/a/b", 1), Err(TokenError::Wrong));
            let other = format!("{without}.bmFtZT1C");
            assert_eq!(keys.verify(&other, "CA1", "/a/b", 1), Err(TokenError::Wrong));
        }
        let token = keys.sign(&CLAIMS);
        for added in ["", "A", &"A".repeat(MAX_PARAMETERS + 1), "A.B"] {
            assert!(keys.verify(&format!("{token}.{added}"), "CA1", "/a/b", 1).is_err(), "{added}");
        }
    }

    #[test]
    fn keys_are_rotated() {
        let token = keys(&["old"]).sign(&CLAIMS);
        assert_eq!(keys(&["new", "old"]).verify(&token, "CA1", "/a/b", 1), VALID);
        assert_eq!(keys(&["new"]).verify(&token, "CA1", "/a/b", 1), Err(TokenError::Wrong));
    }

    #[test]
    fn malformed_tokens_are_refused() {
        let keys = keys(&["k"]);
        let long = format!("1.1000.{}", "A".repeat(100));
        for token in ["", ".", "..", "a.b.c", "1.2", "1.2.3.", "+1.1000.AAAA", "1.-1.AAAA", &long] {
            assert_eq!(keys.verify(token, "CA1", "/a/b", 1), Err(TokenError::Malformed), "{token}");
        }
        let padded = format!("0{}", keys.sign(&CLAIMS));
        assert_eq!(keys.verify(&padded, "CA1", "/a/b", 1), Err(TokenError::Malformed));
        assert!(TokenKeys::new([]).is_none());
    }
}
