//! HMAC signatures, compared in constant time.

use aws_lc_rs::{
    digest::{SHA256, digest},
    hmac::{self, HMAC_SHA1_FOR_LEGACY_USE_ONLY, HMAC_SHA256},
};
use data_encoding::{BASE64, HEXLOWER};

use crate::webhook::InvalidSignature;
use crate::{Secret, constant_time_eq};

/// The hash functions that providers sign with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hash {
    Sha1,
    Sha256,
}

pub(crate) fn hmac(hash: Hash, key: &Secret, parts: &[&[u8]]) -> hmac::Tag {
    let algorithm = match hash {
        Hash::Sha1 => HMAC_SHA1_FOR_LEGACY_USE_ONLY,
        Hash::Sha256 => HMAC_SHA256,
    };
    let mut signing = hmac::Context::with_key(&hmac::Key::new(algorithm, key.as_bytes()));
    parts.iter().for_each(|part| signing.update(part));
    signing.sign()
}

/// Checks whether one of `given` is the Base64 signature of `text` by one of `keys`. It compares
/// Base64 texts, because several texts decode to the same bytes.
pub(crate) fn check_base64<'a>(
    hash: Hash,
    keys: &[Secret],
    text: &[u8],
    given: impl IntoIterator<Item = &'a str>,
) -> Result<(), InvalidSignature> {
    let expected: Vec<String> =
        keys.iter().map(|key| BASE64.encode(hmac(hash, key, &[text]).as_ref())).collect();
    let is_signed = given.into_iter().any(|given| {
        expected.iter().any(|expected| constant_time_eq(expected.as_bytes(), given.as_bytes()))
    });
    if is_signed { Ok(()) } else { Err(InvalidSignature::Mismatch) }
}

/// SHA-256 in lowercase hexadecimal.
pub fn sha256_hex(bytes: &[u8]) -> String {
    HEXLOWER.encode(digest(&SHA256, bytes).as_ref())
}
